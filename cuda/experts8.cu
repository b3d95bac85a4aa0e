// The experts' products on tensor cores (see tensor.cuh): tiles of few pairs directly, tiles of many pairs staged.
//
// Pair row * n_used + slot has a place of its own in `act` and `expert_out`, so grouping decides only what runs together.
#include "tiles.cuh"
#include "wide.cuh"

enum { EXPERT_WIDE = 32 };  // pairs of a staged tile
enum { OUT = 20 };  // floats between columns of partial sums: no bank is met twice

struct Work {
    int shared, tile_rows, row, n_segments, segment, n_groups, n_warps;  // as the kernels' arguments
};

template <int DT> __host__ __device__ constexpr int table_bytes() { return DT == IQ2_XXS ? TABLE_BYTES : 0; }

// What becomes of a finished value: gate and up make an activation, down an expert's output.
struct GateUp {
    enum { MATS = 2 };
    static __device__ __forceinline__ void store(const Run &run, const Layer &layer, int pair, int out, float gate, float up) {
        run.act[(long long)pair * run.ffn_width + out] = swiglu(gate, up, layer.clamp);
    }
    static __device__ __forceinline__ const Mat *mat(const Layer &layer, bool shared, int i) {
        return &layer.mat[shared ? (i ? M_UP_SH : M_GATE_SH) : i ? M_UP_EXPS : M_GATE_EXPS];
    }
    static __device__ __forceinline__ const Quant &input(const Run &run) { return run.xn_q; }
    static __device__ __forceinline__ int input_row(const Run &run, const Tile &t, int i) { return row_at(run, t, i); }
};
struct Down {
    enum { MATS = 1 };
    static __device__ __forceinline__ void store(const Run &run, const Layer &, int pair, int out, float v, float) {
        run.expert_out[(long long)pair * run.hidden + out] = v;
    }
    static __device__ __forceinline__ const Mat *mat(const Layer &layer, bool shared, int) { return &layer.mat[shared ? M_DOWN_SH : M_DOWN_EXPS]; }
    static __device__ __forceinline__ const Quant &input(const Run &run) { return run.act_q; }
    static __device__ __forceinline__ int input_row(const Run &, const Tile &t, int i) { return pair_at(t, i); }
};

template <int DT, int NT> __host__ __device__ constexpr int held_bytes(int n) {  // as in ds4_cuda/tensor.py
    const int rows = NT ? 8 : 4, scales = per_256(DT) ? n / 256 : n / 32, sums = has_min(DT) ? n / 16 : 0;
    return NT > 1 ? 0 : rows * (n + 4 * (scales + sums));
}

// One task of a block: a tile of pairs and n_groups tiles of outputs.
template <int DT, int NT, class Kind> struct Experts {
    using Ring = NoRing;
    enum { EARLY = false, MT = Kind::MATS, TILES = tiles_of(NT), ROWS = NT ? 8 * NT : 4, V = ROWS * OUT };
    enum { K = per_256(DT), HELD = NT <= 1 };
    using Hold = Held<NT, ROWS, K, has_min(DT)>;
    const Run &run;
    const Layer &layer;
    const Work &w;
    float *part;
    uint8_t *room;  // of rows
    int task, block, set;
    float total[MT][TILES][4];

    __device__ __forceinline__ Experts(const Run &run, const Layer &layer, const Work &w, float *part, uint8_t *room, int tile, int block)
        : run(run), layer(layer), w(w), part(part), room(room), task(tile), block(block), set(threadIdx.x / 32 / w.n_warps) {}
    __device__ __forceinline__ Tile pairs() const { return tile_of(run, w.shared, w.tile_rows, w.row, task); }
    __device__ __forceinline__ void ready() {}
    __device__ __forceinline__ constexpr int count() const { return 1; }
    __device__ __forceinline__ NoRing ring(int) const { return {}; }
    __device__ __forceinline__ int outputs() const { return block * w.n_groups + set; }
    __device__ __forceinline__ const Mat &matrix(int, int i) const { return *Kind::mat(layer, w.shared, i); }
    __device__ __forceinline__ int tile(int) const {
        const int n_out = matrix(0, 0).n_out;
        return outputs() * M_TILE < n_out && set < w.n_groups ? pairs().expert * (n_out / M_TILE) + outputs() : -1;
    }
    __device__ __forceinline__ void copy_rows() const {
        if constexpr (HELD) {
            const Tile t = pairs();
            __syncthreads();  // the task before has read its rows
            Hold::copy(room, Kind::input(run), matrix(0, 0).n_in, t.n, [&](int i) { return Kind::input_row(run, t, i); });
        }
    }
    __device__ __forceinline__ auto rows(int) const {
        if constexpr (HELD) {
            return Hold::in(room, matrix(0, 0).n_in);
        } else {
            const Tile t = pairs();
            return Rows<NT, K>::gather(Kind::input(run), matrix(0, 0).n_in, t.n, [&](int i) { return Kind::input_row(run, t, i); });
        }
    }
    __device__ __forceinline__ void segment(int, int s, const float (*acc)[TILES][4]) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int nt = 0; nt < TILES; nt++)
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    if (!used(NT, c)) continue;
                    if (w.n_warps == 1) total[mt][nt][c] = s ? total[mt][nt][c] + acc[mt][nt][c] : acc[mt][nt][c];
                    else part[((set * w.n_segments + s) * MT + mt) * V + column_row(NT, nt, 2 * t + c % 2) * OUT + g + c / 2 * 8] = acc[mt][nt][c];
                }
    }
    __device__ __forceinline__ void finish(int) {
        const Tile now = pairs();
        const int n_out = matrix(0, 0).n_out, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        if (w.n_warps == 1) {
            const int out = outputs() * M_TILE + g;
            if (out < n_out)
#pragma unroll
                for (int nt = 0; nt < TILES; nt++)
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        const int i = column_row(NT, nt, 2 * t + c % 2);
                        if (used(NT, c) && i < now.n) Kind::store(run, layer, pair_at(now, i), out + c / 2 * 8, total[0][nt][c], total[MT - 1][nt][c]);
                    }
            return;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < w.n_groups * ROWS * M_TILE; i += blockDim.x) {
            const int out = i % M_TILE, row = i / M_TILE % ROWS, tile = i / M_TILE / ROWS, at = (block * w.n_groups + tile) * M_TILE + out;
            if (at >= n_out || row >= now.n) continue;
            const float *p = part + tile * w.n_segments * MT * V + row * OUT + out;
            float a = p[0], b = p[(MT - 1) * V];
            for (int s = 1; s < w.n_segments; s++) a += p[s * MT * V], b += p[(s * MT + MT - 1) * V];
            Kind::store(run, layer, pair_at(now, row), at, a, b);
        }
        __syncthreads();  // before the next task's sums
    }
};

// Blocks: n_groups tiles of outputs times n_warps warps that share their segments. Shared: the tables of IQ2_XXS, rings,
// rows (tiles of at most 8 pairs), partial sums.
template <int DT, class Kind, int NT> __device__ __forceinline__ void direct_tasks(const Run &run, const Layer &layer, const Work &w) {
    extern __shared__ __align__(16) uint8_t dynamic[];
    enum { RING = RingSize<DT, Kind::MATS, NoRing>::BYTES };
    uint32_t *tables = (uint32_t *)dynamic;
    if (DT == IQ2_XXS) load_tables(run.tables, tables);
    uint8_t *room = dynamic + table_bytes<DT>();
    const int warp = threadIdx.x / 32, k = warp % w.n_warps;
    const Cut cut = {w.n_segments, w.segment / 32};
    const int blocks = (Kind::mat(layer, w.shared, 0)->n_out / M_TILE + w.n_groups - 1) / w.n_groups;
    const int s0 = k * cut.segments / w.n_warps, s1 = (k + 1) * cut.segments / w.n_warps;
    uint8_t *const rows = room + blockDim.x / 32 * RING;
    const int held = held_bytes<DT, NT>(Kind::mat(layer, w.shared, 0)->n_in);
    follow();
    const int n_tasks = tile_count(run, w.shared, w.tile_rows, w.row) * blocks;
    for (int task = blockIdx.x; task < n_tasks; task += gridDim.x) {
        Experts<DT, NT, Kind> tasks(run, layer, w, (float *)(rows + held), rows, task / blocks, task % blocks);
        stream<DT, Kind::MATS, NT>(cut, s0, s1, room + warp * RING, tables, tasks);
    }
}

// ---------------------------------------------------------------- many pairs

// Warps 2 i and 2 i + 1 have gate and up of one tile of outputs; for down every warp has a tile.
template <int DT, int NT, class Kind>
__device__ __forceinline__ void wide(const Run &run, const Layer &layer, const Work &w, const Tile &t, const int *at, const uint32_t *tables, uint8_t *room) {
    enum { MT = Kind::MATS };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, which = warp % MT, tile = blockIdx.y * (blockDim.x / 32 / MT) + warp / MT;
    const Mat &m = *Kind::mat(layer, t.shared, which);
    const int n_tiles = m.n_out / M_TILE;
    const Cut cut = {w.n_segments, w.segment / 32};
    float total[NT][4];
    wide_walk<DT, NT>(m, t.expert * n_tiles + min(tile, n_tiles - 1), cut, Kind::input(run), at, room, tables, total);
    if (MT == 2) {
        float4 *other = (float4 *)room + warp / 2 * NT * 32 + lane;
        __syncthreads();  // the stages are free
        if (which)
#pragma unroll
            for (int nt = 0; nt < NT; nt++) other[nt * 32] = make_float4(total[nt][0], total[nt][1], total[nt][2], total[nt][3]);
        __syncthreads();
    }
    if (which || tile >= n_tiles) return;
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        const float4 v = MT == 2 ? ((const float4 *)room)[(warp / 2 * NT + nt) * 32 + lane] : make_float4(0, 0, 0, 0);
        const float up[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int i = nt * 8 + lane % 4 * 2 + c % 2;
            if (i < t.n) Kind::store(run, layer, pair_at(t, i), tile * M_TILE + lane / 4 + c / 2 * 8, total[nt][c], up[c]);
        }
    }
}

// grid (tiles of at most 32 pairs, blocks of outputs), block 384 (gate and up: 96 outputs) or 256 (down: 128). Shared:
// tables, two stages. Wider tiles would need so many registers that few warps fit.
template <int DT, class Kind, int> __device__ __forceinline__ void wide_tile(const Run &run, const Layer &layer, const Work &w) {
    extern __shared__ __align__(16) uint8_t dynamic[];
    __shared__ int at[EXPERT_WIDE];
    uint32_t *tables = (uint32_t *)dynamic;
    uint8_t *room = dynamic + table_bytes<DT>();
    follow();
    const Tile t = tile_of(run, w.shared, w.tile_rows, w.row, blockIdx.x);
    if (t.n <= 0) return;
    if (DT == IQ2_XXS) load_tables(run.tables, tables);
    if (threadIdx.x < EXPERT_WIDE)
        at[threadIdx.x] = place_of(Kind::input_row(run, t, min((int)threadIdx.x, t.n - 1)), Kind::mat(layer, t.shared, 0)->n_in);
    __syncthreads();
    if (t.n <= 16) wide<DT, 2, Kind>(run, layer, w, t, at, tables, room);
    else wide<DT, 4, Kind>(run, layer, w, t, at, tables, room);
}

// tile_rows: pairs per tile, at most 8 NT (4 when NT = 0); row: -1, or the only row; n_groups tiles of outputs at a time, n_warps for each.
#define EXPERT8(KERNEL, NT, NAME, KIND, BODY, THREADS, BLOCKS)                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                                  \
        KERNEL##_##NT##_##NAME(const Run run, const Layer layer, int shared, int tile_rows, int row, int n_segments, int segment, \
                               int n_groups, int n_warps) {                                                                    \
        const Work work = {shared, tile_rows, row, n_segments, segment, n_groups, n_warps};                                   \
        BODY<NAME, KIND, NT>(run, layer, work);                                                                               \
    }
#define EXPERTS8(NAME)                                  \
    EXPERT8(gate_up8, 0, NAME, GateUp, direct_tasks, 512, 1) \
    EXPERT8(down8, 0, NAME, Down, direct_tasks, 512, 1)      \
    EXPERT8(gate_up8, 1, NAME, GateUp, direct_tasks, 512, 1) \
    EXPERT8(gate_up8, 2, NAME, GateUp, direct_tasks, 512, 1) \
    EXPERT8(gate_up8, 4, NAME, GateUp, direct_tasks, 256, 1) \
    EXPERT8(gate_up8, 8, NAME, GateUp, wide_tile, 384, 1)    \
    EXPERT8(down8, 1, NAME, Down, direct_tasks, 512, 1)      \
    EXPERT8(down8, 2, NAME, Down, direct_tasks, 512, 1)      \
    EXPERT8(down8, 4, NAME, Down, direct_tasks, 512, 1)      \
    EXPERT8(down8, 8, NAME, Down, wide_tile, 256, 2)
EXPERTS8(Q8_0)
EXPERTS8(Q4_K)
EXPERTS8(Q2_K)
EXPERTS8(IQ2_XXS)
