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

// ---------------------------------------------------------------- few pairs

enum { LISTED = 24, LISTED_PAIRS = 8 };  // tasks of a block that lie in shared memory, and pairs of each

// The tasks of a block: (tile of pairs, block of outputs), every gridDim.x-th of all. Their tiles are looked up once, all at
// the same time; what the list has no room for is looked up when it is needed.
struct Tasks {
    struct Listed {
        int expert, n, pair[LISTED_PAIRS];
    };
    const Run &run;
    const Work &w;
    int blocks, n;  // of outputs; tasks of all blocks
    const Listed *list;

    __device__ __forceinline__ int number(int i) const { return blockIdx.x + i * gridDim.x; }
    __device__ __forceinline__ Tile look_up(int i) const { return tile_of(run, w.shared, w.tile_rows, w.row, number(i) / blocks); }
    // Fills the list, a task per thread. All threads.
    __device__ __forceinline__ void fill(Listed *to) {
        const int i = threadIdx.x;
        if (i < LISTED && number(i) < n) {
            const Tile t = look_up(i);
            to[i].expert = t.expert, to[i].n = t.n;
            for (int k = 0; k < min(t.n, (int)LISTED_PAIRS); k++) to[i].pair[k] = pair_at(t, k);
        }
        __syncthreads();
        list = to;
    }
    __device__ __forceinline__ int expert(int i) const { return i < LISTED ? list[i].expert : look_up(i).expert; }
    __device__ __forceinline__ Tile tile(int i) const {
        if (w.shared || i >= LISTED || list[i].n > LISTED_PAIRS) return look_up(i);
        return {list[i].pair, list[i].expert, 0, list[i].n, 0, false};
    }
};

// What a warp copies ahead to its ring: the same stretch of K of its tasks' weights, across their borders.
template <int DT, int MT> struct Feed {
    using R = Raw<DT>;
    using Size = RingSize<DT, MT, NoRing>;
    typename R::Source from[MT];
    int begin, end, place, task, stage;  // blocks; the task that is copied; bytes into the ring
    Shared ring;

    __device__ __forceinline__ void open(const Mat *const *mats, int tile) {
        place = begin;
        for (int i = 0; i < MT; i++) from[i] = typename R::Source(*mats[i], tile);
    }
    __device__ __forceinline__ bool is_through() const { return place >= end; }
    __device__ __forceinline__ void copy() {
        if (place < end)
#pragma unroll
            for (int i = 0; i < MT; i++) R::copy(from[i], place, ring + stage + i * R::BYTES);
        copy_commit();
        place += R::BLOCKS;
        stage = stage + Size::STEP == Size::BYTES ? 0 : stage + Size::STEP;
    }
};

template <int DT, int NT, class Kind>
__device__ __forceinline__ void store_totals(const Run &run, const Layer &layer, const Tile &t, int tile, const float (*total)[tiles_of(NT)][4]) {
    const int g = threadIdx.x % 32 / 4, lane_t = threadIdx.x % 4;
#pragma unroll
    for (int nt = 0; nt < tiles_of(NT); nt++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int i = column_row(NT, nt, 2 * lane_t + c % 2);
            if (used(NT, c) && i < t.n)
                Kind::store(run, layer, pair_at(t, i), tile * M_TILE + g + c / 2 * 8, total[0][nt][c], total[Kind::MATS - 1][nt][c]);
        }
}

// Adds up the segments of a block of outputs. All threads.
template <int DT, int NT, class Kind>
__device__ __forceinline__ void store_parts(const Run &run, const Layer &layer, const Work &w, const Tile &t, int block, int n_out, const float *part) {
    enum { MT = Kind::MATS, ROWS = NT ? 8 * NT : 4, V = ROWS * OUT };
    __syncthreads();
    for (int i = threadIdx.x; i < w.n_groups * ROWS * M_TILE; i += blockDim.x) {
        const int out = i % M_TILE, row = i / M_TILE % ROWS, set = i / M_TILE / ROWS, at = (block * w.n_groups + set) * M_TILE + out;
        if (at >= n_out || row >= t.n) continue;
        const float *p = part + set * w.n_segments * MT * V + row * OUT + out;
        float a = p[0], b = p[(MT - 1) * V];
        for (int s = 1; s < w.n_segments; s++) a += p[s * MT * V], b += p[(s * MT + MT - 1) * V];
        Kind::store(run, layer, pair_at(t, row), at, a, b);
    }
    __syncthreads();  // before the next task's sums
}

// Blocks take (tile, block of outputs) tasks in turn: n_groups tiles of outputs times n_warps warps that share their
// segments. Shared: the tables of IQ2_XXS, rings, partial sums.
template <int DT, class Kind, int NT> __device__ __forceinline__ void direct_tasks(const Run &run, const Layer &layer, const Work &w) {
    enum { MT = Kind::MATS, TILES = tiles_of(NT), V = (NT ? 8 * NT : 4) * OUT };
    using R = Raw<DT>;
    using Size = RingSize<DT, MT, NoRing>;
    extern __shared__ __align__(16) uint8_t dynamic[];
    __shared__ Tasks::Listed listed[LISTED];
    uint32_t *tables = (uint32_t *)dynamic;
    if (DT == IQ2_XXS) load_tables(run.tables, tables);
    uint8_t *room = dynamic + table_bytes<DT>();
    const Mat *const mats[2] = {Kind::mat(layer, w.shared, 0), Kind::mat(layer, w.shared, 1)};
    const int n_in = mats[0]->n_in, n_out = mats[0]->n_out, n_tiles = n_out / M_TILE, segment = w.segment / 32;
    const int warp = threadIdx.x / 32, wk = warp % w.n_warps, set = warp / w.n_warps, g = threadIdx.x % 32 / 4, lane_t = threadIdx.x % 4;
    const int s0 = set < w.n_groups ? wk * w.n_segments / w.n_warps : 0, s1 = set < w.n_groups ? (wk + 1) * w.n_segments / w.n_warps : 0;
    float *part = (float *)(room + blockDim.x / 32 * Size::BYTES);
    Tasks tasks = {run, w, (n_tiles + w.n_groups - 1) / w.n_groups};
    // Tiles beyond the last are another time the last, and not stored.
    const auto tile_at = [&](int i) { return min(tasks.number(i) % tasks.blocks * w.n_groups + set, n_tiles - 1); };
    Feed<DT, MT> feed;
    feed.ring = Shared(room + warp * Size::BYTES);
    feed.begin = s0 * segment, feed.end = min(s1 * segment, n_in / 32), feed.task = feed.stage = 0;
    follow();
    const Tile first = tasks.look_up(0);  // loaded together with the count
    tasks.n = tile_count(run, w.shared, w.tile_rows, w.row) * tasks.blocks;
    if (tasks.number(0) >= tasks.n) return;
    feed.open(mats, first.expert * n_tiles + tile_at(0));
    int ahead = 0;
    for (; ahead + 1 < Size::DEPTH && !feed.is_through(); ahead++) feed.copy();
    tasks.fill(listed);
    const auto copy = [&] {
        if (feed.is_through() && tasks.number(feed.task + 1) < tasks.n) {
            feed.task++;
            feed.open(mats, tasks.expert(feed.task) * n_tiles + tile_at(feed.task));
        }
        feed.copy();
    };
    for (; ahead + 1 < Size::DEPTH; ahead++) copy();
    int stage = 0;
    for (int i = 0; tasks.number(i) < tasks.n; i++) {
        const Tile t = tasks.tile(i);
        const auto b = Rows<NT, per_256(DT)>::gather(Kind::input(run), n_in, t.n, [&](int k) { return Kind::input_row(run, t, k); });
        float total[MT][TILES][4];
        int block = feed.begin;
        for (int s = s0; s < s1; s++) {
            float acc[MT][TILES][4] = {};
            const int stop = min((s + 1) * segment, feed.end);
            for (; block < stop; block += R::BLOCKS) {
                R raw[MT];
                copy_wait<Size::DEPTH - 2>();
                __syncwarp();
#pragma unroll
                for (int m = 0; m < MT; m++) raw[m].take(feed.ring + stage + m * R::BYTES);
                copy();  // to the stage that was taken a step ago
                R::template step<MT, NT>(raw, block, stop, b, acc, tables);
                stage = stage + Size::STEP == Size::BYTES ? 0 : stage + Size::STEP;
            }
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int nt = 0; nt < TILES; nt++)
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        if (!used(NT, c)) continue;
                        if (w.n_warps == 1) total[m][nt][c] = s ? total[m][nt][c] + acc[m][nt][c] : acc[m][nt][c];
                        else part[((set * w.n_segments + s) * MT + m) * V + column_row(NT, nt, 2 * lane_t + c % 2) * OUT + g + c / 2 * 8] = acc[m][nt][c];
                    }
        }
        const int block_of = tasks.number(i) % tasks.blocks, tile = block_of * w.n_groups + set;
        if (w.n_warps > 1) store_parts<DT, NT, Kind>(run, layer, w, t, block_of, n_out, part);
        else if (tile < n_tiles && set < w.n_groups) store_totals<DT, NT, Kind>(run, layer, t, tile, total);
    }
    copy_wait<0>();
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
    EXPERT8(gate_up8, 0, NAME, GateUp, direct_tasks, 256, 2) \
    EXPERT8(down8, 0, NAME, Down, direct_tasks, 256, 2)      \
    EXPERT8(gate_up8, 1, NAME, GateUp, direct_tasks, 256, 2) \
    EXPERT8(gate_up8, 2, NAME, GateUp, direct_tasks, 256, 2) \
    EXPERT8(gate_up8, 4, NAME, GateUp, direct_tasks, 256, 1) \
    EXPERT8(gate_up8, 8, NAME, GateUp, wide_tile, 384, 1)    \
    EXPERT8(down8, 1, NAME, Down, direct_tasks, 256, 2)      \
    EXPERT8(down8, 2, NAME, Down, direct_tasks, 256, 2)      \
    EXPERT8(down8, 4, NAME, Down, direct_tasks, 256, 2)      \
    EXPERT8(down8, 8, NAME, Down, wide_tile, 256, 2)
EXPERTS8(Q8_0)
EXPERTS8(Q4_0)
EXPERTS8(MXFP4)
EXPERTS8(Q4_K)
EXPERTS8(Q5_K)
EXPERTS8(Q6_K)
EXPERTS8(Q2_K)
EXPERTS8(IQ2_XXS)
