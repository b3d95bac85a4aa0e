/* Where cached rows lie, and their element type. The layout is that of ds4.backend.layout.
 *
 *     positions of an item:   [0, item_pos) committed: slab rings, pages
 *                             [item_pos, ...) this step: step buffers; entries that complete go into page slots
 */
#ifndef DS4_CACHE_H
#define DS4_CACHE_H

#include "half.h"
#include "model.h"

static inline uint8_t *ds4_slab(const ds4_run *run, int item) {
    return run->cache.slabs + (size_t)run->plan.item_slab[item] * run->cache.slab_bytes;
}

/* Step-buffer row of a position of this step. */
static inline size_t ds4_step_row(const ds4_run *run, int item, int pos) {
    return (size_t)(run->plan.item_row[item] + (pos - run->plan.item_pos[item]));
}

/* The latent row (key = value) of a position. */
static inline const uint8_t *ds4_latent_at(const ds4_run *run, const ds4_layer *layer, int item, int pos) {
    const size_t row_bytes = (size_t)run->model.head_dim * run->cache.row_item;
    if (pos >= run->plan.item_pos[item]) return layer->step_latent + ds4_step_row(run, item, pos) * row_bytes;
    return ds4_slab(run, item) + layer->latent + (size_t)(pos % run->cache.ring) * row_bytes;
}

/* The k and g rows, float32 [2, comp_width], of a position. */
static inline const float *ds4_comp_at(const ds4_run *run, const ds4_layer *layer, int item, int pos) {
    const size_t n = 2 * (size_t)layer->comp_width;
    if (pos >= run->plan.item_pos[item]) return layer->step_comp + ds4_step_row(run, item, pos) * n;
    return (const float *)(ds4_slab(run, item) + layer->comp) + (size_t)(pos % layer->comp_ring) * n;
}

/* The same of the indexer, float32 [2, 2 * index_dim]. */
static inline const float *ds4_index_comp_at(const ds4_run *run, const ds4_layer *layer, int item, int pos) {
    const size_t n = 4 * (size_t)run->model.index_dim;
    if (pos >= run->plan.item_pos[item]) return layer->step_index_comp + ds4_step_row(run, item, pos) * n;
    return (const float *)(ds4_slab(run, item) + layer->index_comp) + (size_t)(pos % layer->comp_ring) * n;
}

/* Slot of entry w in the page part at `offset`, with rows of `dim` elements. */
static inline uint8_t *ds4_entry_slot(const ds4_run *run, const ds4_layer *layer, int item, int w, ptrdiff_t offset,
                                      int dim) {
    const int per_page = DS4_PAGE_TOKENS / layer->ratio;
    const int32_t page = run->plan.page_ids[run->plan.page_start[item] + w / per_page];
    return run->cache.pages + (size_t)page * run->cache.page_bytes + offset +
           (size_t)(w % per_page) * (size_t)dim * run->cache.row_item;
}

static inline uint8_t *ds4_entry_at(const ds4_run *run, const ds4_layer *layer, int item, int w) {
    return ds4_entry_slot(run, layer, item, w, layer->entries, run->model.head_dim);
}

static inline uint8_t *ds4_key_at(const ds4_run *run, const ds4_layer *layer, int item, int w) {
    return ds4_entry_slot(run, layer, item, w, layer->index_keys, run->model.index_dim);
}

/* Values are rounded to the cache dtype when they are written, in step buffers too: a row reads the same from
 * wherever it lies. */
static inline void ds4_store_row(const ds4_run *run, uint8_t *to, const float *row, int n) {
    if (run->cache.row_item == sizeof(float)) {
        memcpy(to, row, (size_t)n * sizeof(float));
        return;
    }
    uint16_t *half = (uint16_t *)to;
    for (int k = 0; k < n; k++) half[k] = ds4_f32_to_f16(row[k]);
}

/* The row as float32: in place where the cache holds float32, else decoded into `room`. */
static inline const float *ds4_load_row(const ds4_run *run, const uint8_t *from, float *room, int n) {
    if (run->cache.row_item == sizeof(float)) return (const float *)from;
    run->leaf->decode[DS4_F16](from, room, n, &run->model.tables);
    return room;
}

#endif
