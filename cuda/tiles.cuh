// Tiles: the (row, slot) pairs of one expert, or rows for the shared expert, that a block works on together.
#pragma once
#include "common.cuh"

struct Tile {
    const int *pairs;  // null: consecutive ones from `pair` on
    int expert, first, n, pair;
    bool shared;
};

// Tile `i`. shared: the shared expert, whose pairs lie behind all others. row >= 0: only this row's pairs, tile i is slot i.
__device__ __forceinline__ Tile tile_of(const Run &run, int shared, int tile_rows, int row, int i) {
    const int behind = run.max_rows * run.n_used;
    if (row >= 0) {
        if (shared) return {nullptr, 0, row, 1, behind + row, true};
        const int pair = row * run.n_used + i;
        return {nullptr, run.route[pair], 0, 1, pair, false};
    }
    if (shared) {
        const int first = i * tile_rows;
        return {nullptr, 0, first, min(*run.n_rows - first, tile_rows), behind + first, true};
    }
    // All loads at once: what lies beyond the last tile is read and not used.
    const int *tile = run.tiles + 1 + 3 * i, n_tiles = run.tiles[0], expert = tile[0], first = tile[1], n = tile[2];
    const bool is_there = i < n_tiles;
    return {run.pairs + (is_there ? first : 0), is_there ? expert : 0, is_there ? first : 0, is_there ? n : 0, 0, false};
}

__device__ __forceinline__ int tile_count(const Run &run, int shared, int tile_rows, int row) {
    if (row >= 0) return shared ? 1 : run.n_used;
    return shared ? (*run.n_rows + tile_rows - 1) / tile_rows : run.tiles[0];
}

__device__ __forceinline__ int pair_at(const Tile &t, int i) { return t.pairs ? t.pairs[i] : t.pair + i; }

// The row whose channels a pair multiplies.
__device__ __forceinline__ int row_at(const Run &run, const Tile &t, int i) {
    return t.shared ? t.first + i : pair_at(t, i) / run.n_used;
}
