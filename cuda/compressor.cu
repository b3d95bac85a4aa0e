// Compressors: r consecutive tokens become one cache entry, by a softmax over the tokens for every channel alone.
#include "common.cuh"

// grid (rows, 1 or 2), block 256, shared: max(head_dim, index_dim) floats. A row that ends a window computes its entry
// (y = 0) or index key (y = 1) and writes it into its page slot.
extern "C" __global__ void complete_entries(const Run run, const Layer layer, int row0) {
    follow();
    extern __shared__ float entry[];
    __shared__ float room[8];
    const int row = row0 + blockIdx.x, ratio = layer.ratio;
    if (row >= *run.n_rows) return;
    const int last = run.pos[row], item = run.row_item[row], w = last / ratio;
    if ((last + 1) % ratio) return;
    const bool is_key = blockIdx.y == 1;
    const int dim = is_key ? run.index_dim : run.head_dim, width = is_key ? 2 * run.index_dim : layer.comp_width;
    const int first = ratio * (ratio == CSA && w > 0 ? w - 1 : w), n_pairs = run.rope_dim / 2;
    float squares = 0.0f;
    for (int c = threadIdx.x; c < dim; c += blockDim.x) {
        float top = -INFINITY, total = 0.0f, sum = 0.0f;
        for (int pos = first; pos <= last; pos++) {  // CSA: first halves of the window before, second halves of this one
            const float *k = (is_key ? index_comp_at(run, layer, item, pos) : comp_at(run, layer, item, pos)) + c +
                             (ratio == CSA && pos >= ratio * w ? dim : 0);
            top = fmaxf(top, k[width]);
        }
        for (int pos = first; pos <= last; pos++) {
            const float *k = (is_key ? index_comp_at(run, layer, item, pos) : comp_at(run, layer, item, pos)) + c +
                             (ratio == CSA && pos >= ratio * w ? dim : 0);
            const float weight = expf(k[width] - top);
            total += weight;
            sum = fmaf(weight, k[0], sum);
        }
        entry[c] = sum / total;
        squares = fmaf(entry[c], entry[c], squares);
    }
    const float inverse = 1.0f / sqrtf(block_sum(squares, room) / (float)dim + run.rms_eps);
    const float *norm = layer.vec[is_key ? V_IX_COMP_NORM : V_COMP_NORM];
    for (int c = threadIdx.x; c < dim; c += blockDim.x) entry[c] = entry[c] * inverse * norm[c];
    __syncthreads();
    for (int i = threadIdx.x; i < n_pairs; i += blockDim.x) {  // at the window's first position
        const double angle = (double)(ratio * w) * run.freq[1][i];
        rotate_pair(entry + dim - run.rope_dim, i, (float)cos(angle), (float)sin(angle));
    }
    __syncthreads();
    if (run.roundings && !is_key) round_latent(entry, dim, dim - run.rope_dim);
    if (run.roundings && is_key) {
        round_index(entry, dim);
        for (int c = threadIdx.x; c < dim; c += blockDim.x) entry[c] = __half2float(__float2half_rn(entry[c]));
        __syncthreads();
    }
    uint8_t *to = entry_slot(run, layer, item, w, is_key ? layer.index_keys : layer.entries, dim);
    for (int c = threadIdx.x; c < dim; c += blockDim.x) store_cached(run, to, c, entry[c]);
}
