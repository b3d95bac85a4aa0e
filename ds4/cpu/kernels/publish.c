/* Publishing: the end of a step, and the only writer of committed ring slots.
 *
 *     step buffers, rows of an item:   [item_pos, end)
 *     rings keep the last `slots`:     [max(item_pos, end - slots), end)
 */
#include "cache.h"
#include "forward.h"

typedef struct {
    uint8_t *ring;
    const uint8_t *rows; /* of the item's first row */
    size_t row_bytes;
    int slots;
} part;

static void copy_part(const part *p, int pos, int end) {
    const int first = end - pos > p->slots ? end - p->slots : pos;
    for (int at = first; at < end; at++)
        memcpy(p->ring + (size_t)(at % p->slots) * p->row_bytes, p->rows + (size_t)(at - pos) * p->row_bytes,
               p->row_bytes);
}

static void publish_layer(ds4_run *run, const ds4_layer *layer, int item) {
    const size_t row = (size_t)run->plan.item_row[item], latent = (size_t)run->model.head_dim * run->cache.row_item;
    const size_t comp = 2 * (size_t)layer->comp_width, index = 4 * (size_t)run->model.index_dim;
    const int pos = run->plan.item_pos[item], end = pos + run->plan.item_row[item + 1] - (int)row;
    uint8_t *slab = ds4_slab(run, item);
    const part latents = {slab + layer->latent, layer->step_latent + row * latent, latent, run->cache.ring};
    copy_part(&latents, pos, end);
    if (layer->ratio) {
        const part rows = {slab + layer->comp, (const uint8_t *)(layer->step_comp + row * comp), comp * sizeof(float),
                           layer->comp_ring};
        copy_part(&rows, pos, end);
    }
    if (layer->ratio == DS4_CSA) {
        const part rows = {slab + layer->index_comp, (const uint8_t *)(layer->step_index_comp + row * index),
                           index * sizeof(float), layer->comp_ring};
        copy_part(&rows, pos, end);
    }
}

void ds4_publish(ds4_run *run) {
    for (int item = 0; item < run->plan.n_items; item++)
        for (int i = 0; i < run->model.n_layers; i++) publish_layer(run, run->model.layer + i, item);
}
