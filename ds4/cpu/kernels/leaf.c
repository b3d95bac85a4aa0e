/* The versions of the leaf functions and the choice among them. */
#include "leaf.h"

#include <stddef.h>
#include <string.h>

#include "half.h"

#define FN(name) name##_plain
#define TARGET
#define LEAF_NAME "plain"
#define VBYTES 16
#ifdef __aarch64__ /* 32 registers */
#define TILE_W 2
#define TILE_X 2
#else
#define TILE_W 1
#define TILE_X 2
#endif
#include "leaf_body.h"
#undef FN
#undef TARGET
#undef LEAF_NAME
#undef VBYTES
#undef TILE_W
#undef TILE_X

#if defined(__x86_64__) && defined(__GNUC__)
#define DS4_X86_LEVELS

#define FN(name) name##_avx2
#define TARGET __attribute__((target("avx2")))
#define LEAF_NAME "avx2"
#define VBYTES 32
#define TILE_W 2
#define TILE_X 2
#include "leaf_body.h"
#undef FN
#undef TARGET
#undef LEAF_NAME
#undef VBYTES
#undef TILE_W
#undef TILE_X

#define FN(name) name##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define LEAF_NAME "avx512"
#define VBYTES 64
#define TILE_W 4
#define TILE_X 4
#include "leaf_body.h"
#endif

#ifdef DS4_X86_LEVELS
const ds4_leaf *const *ds4_leaf_levels(void) {
    static const ds4_leaf *const all[] = {&leaf_plain, &leaf_avx2, &leaf_avx512, NULL};
    static const ds4_leaf *const up_to_avx2[] = {&leaf_plain, &leaf_avx2, NULL};
    static const ds4_leaf *const only_plain[] = {&leaf_plain, NULL};
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2")) return only_plain;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return up_to_avx2;
    return all;
}
#else
const ds4_leaf *const *ds4_leaf_levels(void) {
    static const ds4_leaf *const only_plain[] = {&leaf_plain, NULL};
    return only_plain;
}
#endif

void ds4_fill_signs(ds4_tables *tables) {
    for (int code = 0; code < 128; code++) {
        int parity = 0;
        for (int k = 0; k < 7; k++) {
            tables->iq2_xxs_sign[code][k] = code >> k & 1 ? -1.0f : 1.0f;
            parity ^= code >> k & 1;
        }
        tables->iq2_xxs_sign[code][7] = parity ? -1.0f : 1.0f;
    }
}

const ds4_leaf *ds4_leaf_best(void) {
    const ds4_leaf *const *level = ds4_leaf_levels();
    while (level[1]) level++;
    return *level;
}
