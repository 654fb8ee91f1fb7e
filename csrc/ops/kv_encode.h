// One token's key or value of one head, as a KV type stores it.
#pragma once

#include <cstring>

#include "ops/kv_layout.h"
#include "vec/wide.h"

namespace penstock::PENSTOCK_ISA {

// A head's elements and their codes, before they go to their places. Elements beyond the head are zero up to a multiple
// of 32.
struct KvEntry {
    float* value;                  // [room]
    std::uint32_t* code;           // [room], one code each
    float scale;                   // of all elements (f8_e4m3, i8)
    std::uint16_t* group_scale;    // bfloat16, one for 32 elements (i4)
    std::uint16_t* group_minimum;  // the same
    std::uint16_t* half;           // [2][16][room], elements of up to 16 tokens' keys and values (bf16)
};

static inline std::uint32_t bits_of(float value) {
    std::uint32_t out;
    std::memcpy(&out, &value, 4);
    return out;
}
static inline float float_of(std::uint32_t bits) {
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// The greatest magnitude; NaN if a value is not finite.
static inline float most_magnitude(const float* value, std::int64_t count) {
    vec::F32x16 most = vec::splat16(0.0f), odd = most;
    for (std::int64_t i = 0; i < count; i += 16) {
        const vec::F32x16 x = vec::load16(value + i);
        most = vec::max(most, vec::abs(x));
        odd = odd + (x - x);
    }
    return vec::most(most) + vec::sum(odd);
}

// Saturated at the greatest finite half.
static inline void encode_f16(KvEntry& entry, std::int64_t count) {
    for (std::int64_t i = 0; i < count; i += 16) {
        std::uint16_t bits[16];
        const vec::F32x16 x = vec::load16(entry.value + i);
        vec::store16_f16(bits, vec::max(vec::splat16(-65504.0f), vec::min(vec::splat16(65504.0f), x)));
        for (int j = 0; j < 16; ++j) entry.code[i + j] = bits[j];
    }
}

static inline void encode_e4m3(KvEntry& entry, std::int64_t count) {
    const float most = most_magnitude(entry.value, count);
    entry.scale = most / 448.0f;
    const vec::F32x16 inverse = vec::splat16(most > 0.0f ? 448.0f / most : 0.0f);
    for (std::int64_t i = 0; i < count; i += 16) {
        std::uint8_t bits[16];
        vec::store16_e4m3(bits, vec::load16(entry.value + i) * inverse);
        for (int j = 0; j < 16; ++j) entry.code[i + j] = bits[j];
    }
}

static inline void encode_i8(KvEntry& entry, std::int64_t count) {
    const float most = most_magnitude(entry.value, count);
    entry.scale = most / 127.0f;
    const vec::F32x16 inverse = vec::splat16(most > 0.0f ? 127.0f / most : 0.0f), end = vec::splat16(127.0f);
    for (std::int64_t i = 0; i < count; i += 16) {
        float lane[16];
        const vec::F32x16 x = vec::round(vec::load16(entry.value + i) * inverse);
        vec::store(lane, vec::max(x, vec::splat16(-127.0f)));  // NaN becomes -127, to be multiplied by a scale of NaN
        vec::store(lane, vec::min(vec::load16(lane), end));
        for (int j = 0; j < 16; ++j)
            entry.code[i + j] = static_cast<std::uint32_t>(static_cast<std::int32_t>(lane[j])) & 0xff;
    }
}

// The nearest bfloat16, ties to even.
static inline std::uint16_t bf16_of(float value) {
    const std::uint32_t bits = bits_of(value);
    if (value != value) return 0x7fc0;
    return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Scale and minimum are rounded first and the codes chosen for the rounded ones. `count` elements belong to the head.
static inline void encode_i4(KvEntry& entry, std::int64_t count) {
    for (std::int64_t g = 0; g * kv_group < count; ++g) {
        const float* const x = entry.value + g * kv_group;
        const std::int64_t size = count - g * kv_group < kv_group ? count - g * kv_group : kv_group;
        float low = x[0], high = x[0], odd = 0.0f;
        for (std::int64_t i = 0; i < size; ++i) {
            low = x[i] < low ? x[i] : low;
            high = x[i] > high ? x[i] : high;
            odd += x[i] - x[i];
        }
        entry.group_minimum[g] = bf16_of(low);
        entry.group_scale[g] = bf16_of((high - low) / 15.0f + odd);
        const float minimum = float_of(std::uint32_t{entry.group_minimum[g]} << 16);
        const float scale = float_of(std::uint32_t{entry.group_scale[g]} << 16),
                    inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        for (std::int64_t i = 0; i < kv_group; ++i) {
            const float place = i < size ? (x[i] - minimum) * inverse + 0.5f : 0.0f;
            entry.code[g * kv_group + i] = place >= 15.0f ? 15 : place > 0.0f ? static_cast<std::uint32_t>(place) : 0;
        }
    }
}

// Fills in codes and scales of the first `count` elements and the zeros after them.
static inline void encode_entry(KvType type, KvEntry& entry, std::int64_t count) {
    const std::int64_t room = round_up(count, kv_tile);
    switch (type) {
        case KvType::f32:
            for (std::int64_t i = 0; i < room; ++i) entry.code[i] = bits_of(entry.value[i]);
            return;
        case KvType::bf16:
            return;  // rounded where they are placed
        case KvType::f16:
            return encode_f16(entry, room);
        case KvType::f8_e4m3:
            return encode_e4m3(entry, room);
        case KvType::i8:
            return encode_i8(entry, room);
        case KvType::i4:
            return encode_i4(entry, count);
    }
}

}  // namespace penstock::PENSTOCK_ISA
