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
    if (layer.ratio)
        copy_row(slab + layer.comp, (const uint8_t *)layer.step_comp, row, 2 * layer.comp_width * 4, pos, end, layer.comp_ring);
    if (layer.ratio == CSA)
        copy_row(slab + layer.index_comp, (const uint8_t *)layer.step_index_comp, row, 4 * run.index_dim * 4, pos, end, layer.comp_ring);
}
