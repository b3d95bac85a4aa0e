// Publishing: the end of a step, and the only writer of committed ring slots.
//
//     step buffers, rows of an item:   [item_pos, end)
//     rings keep the last `slots`:     [max(item_pos, end - slots), end)
#include "common.cuh"

__device__ __forceinline__ void copy_row(uint8_t *ring, const uint8_t *rows, int row, int bytes, int pos, int end, int slots) {
    if (end - pos > slots) return;
    const uint32_t *from = (const uint32_t *)(rows + (long long)row * bytes);
    uint32_t *to = (uint32_t *)(ring + (long long)(pos % slots) * bytes);
    for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) to[i] = from[i];
}

// A compressor's row: k, then the gate, to which ape is added on the way.
__device__ __forceinline__ void copy_compressor_row(uint8_t *ring, const float *rows, const float *ape, int row, int width,
                                                    int pos, int end, int slots) {
    if (end - pos > slots) return;
    const float *from = rows + 2LL * row * width;
    float *to = (float *)ring + 2LL * (pos % slots) * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        to[i] = from[i];
        to[width + i] = from[width + i] + ape[i];
    }
}

// grid (rows, layers), block 256.
extern "C" __global__ void publish_rows(const Run run, const Layer *layers) {
    follow();
    const int row = blockIdx.x;
    if (row >= *run.n_rows) return;
    const Layer &layer = layers[blockIdx.y];
    const int item = run.row_item[row], pos = run.pos[row];
    const int end = run.item_pos[item] + run.item_row[item + 1] - run.item_row[item];
    uint8_t *slab = slab_of(run, item);
    copy_row(slab + layer.latent, layer.step_latent, row, run.head_dim * cache_bytes(run), pos, end, run.ring);
    if (!layer.ratio) return;
    const int slot = pos % layer.ratio, width = layer.comp_width, index_width = 2 * run.index_dim;
    const float *ape = layer.vec[V_COMP_APE] + slot * width;
    copy_compressor_row(slab + layer.comp, layer.step_comp, ape, row, width, pos, end, layer.comp_ring);
    if (layer.ratio != CSA) return;
    const float *index_ape = layer.vec[V_IX_COMP_APE] + slot * index_width;
    copy_compressor_row(slab + layer.index_comp, layer.step_index_comp, index_ape, row, index_width, pos, end, layer.comp_ring);
}
