// Draws by noise: of all candidates the token with the largest scaled distance from the largest logit plus noise, of
// equal ones the lower id. Noise is bounded, so a token far below the best sum so far is not looked at.
#pragma once

#include "ops/noise.h"
#include "ops/scan.h"

namespace penstock::PENSTOCK_ISA {

class Draw {
public:
    // `top` is a logit of a candidate: the larger, the less has to be looked at.
    Draw(const NoiseKey& key, float max, double scale, float top) : key_(key), max_(max), scale_(scale) {
        raise(sum(top, static_cast<std::int64_t>(least_noise * unit)));
    }

    // The tokens 0 to count - 1.
    void take_all(const float* values, std::int64_t count) {
        for (std::int64_t at = 0; at < count; at += lot) {
            const std::int64_t size = at + lot < count ? lot : count - at;
            const float top = largest(values + at, size);
            if (top < least_logit_ || !any_may_win(at, top)) continue;
            for (std::int64_t i = 0; i < size; ++i) consider(at + i, values[at + i]);
        }
    }

    // Tokens of rising ids.
    template <class Value>
    void take_list(const std::uint32_t* ids, const Value* values, std::int64_t count) {
        for (std::int64_t from = 0, to = 0; from < count; from = to) {
            const std::int64_t at = ids[from] / lot * lot;
            Value top = static_cast<Value>(neg_inf);
            for (; to < count && ids[to] < at + lot; ++to) top = values[to] > top ? values[to] : top;
            if (top < least_logit_ || !any_may_win(at, top)) continue;
            for (std::int64_t i = from; i < to; ++i) consider(ids[i], values[i]);
        }
    }

    std::int64_t token() const { return token_; }

private:
    static constexpr int calls = 16, lot = 4 * calls;  // tokens whose random bits are made together
    static constexpr double unit = static_cast<double>(std::int64_t{1} << noise_bits);

    // Philox4x32-10 (philox.h), eight calls at a time.
    void make_words(std::int64_t at) {
        constexpr int vectors = calls / 8;
        std::uint32_t fourth[calls];
        for (int i = 0; i < calls; ++i) fourth[i] = static_cast<std::uint32_t>(at / 4 + i);
        const auto word = [](std::uint64_t x) { return vec::splat_words(static_cast<std::uint32_t>(x)); };
        vec::U64 c0[vectors], c1[vectors], c2[vectors], c3[vectors];
        for (int i = 0; i < vectors; ++i) {
            c0[i] = word(key_.position);
            c1[i] = word(key_.position >> 32);
            c2[i] = word(key_.sequence);
            c3[i] = vec::load_words(fourth + 8 * i);
        }
        const vec::U64 first = word(0xD2511F53u), second = word(0xCD9E8D57u);
        std::uint32_t low = static_cast<std::uint32_t>(key_.seed), high = static_cast<std::uint32_t>(key_.seed >> 32);
        for (int round = 0; round < 10; ++round) {
            const vec::U64 k0 = word(low), k1 = word(high);
            for (int i = 0; i < vectors; ++i) {
                const vec::U64 a = vec::multiply_words(c0[i], first), b = vec::multiply_words(c2[i], second);
                c0[i] = vec::high_words(b) ^ c1[i] ^ k0;
                c2[i] = vec::high_words(a) ^ c3[i] ^ k1;
                c1[i] = b;
                c3[i] = a;
            }
            low += 0x9E3779B9u;
            high += 0xBB67AE85u;
        }
        for (int i = 0; i < vectors; ++i) {
            vec::store_words(words_[0] + 8 * i, c0[i]);
            vec::store_words(words_[1] + 8 * i, c1[i]);
            vec::store_words(words_[2] + 8 * i, c2[i]);
            vec::store_words(words_[3] + 8 * i, c3[i]);
        }
    }

    // Makes the random bits of the lot at `at`, a multiple of its size; whether one of its tokens may win, whose logits
    // are at most `top`. With c the complement of its bits, of n bits, a token's noise is at most (33 - n) ln 2.
    bool any_may_win(std::int64_t at, double top) {
        const double needed = static_cast<double>(best_) / unit - distance(top);
        const int bits = static_cast<int>(33.01 - needed * 1.4426950408889634);
        if (bits < 0) return false;
        least_word_ = bits >= 32 ? 0 : 0u - (1u << bits);
        make_words(at);
        int any = 0;
        for (int lane = 0; lane < 4; ++lane)
            for (int i = 0; i < calls; ++i) any |= words_[lane][i] >= least_word_;
        return any;
    }

    // A token of the lot that was made last.
    template <class Value>
    void consider(std::int64_t token, Value value) {
        const std::uint32_t word = words_[token % 4][token / 4 % calls];
        if (word < least_word_ || value < least_logit_) return;
        const std::int64_t found = sum(value, gumbel(word));
        if (found <= best_) return;
        token_ = token;
        raise(found);
    }

    double distance(double value) const {
        const double found = (value - static_cast<double>(max_)) * scale_;
        return found > least_distance ? found : least_distance;
    }
    std::int64_t sum(double value, std::int64_t noise) const {
        return static_cast<std::int64_t>(distance(value) * unit) + noise;
    }

    void raise(std::int64_t sum) {
        best_ = sum;
        least_logit_ = below_exponent(static_cast<double>(sum) / unit - most_noise, max_, scale_);
    }

    static float largest(const float* values, std::int64_t count) {
        vec::F32 most = vec::splat(neg_inf);
        for (std::int64_t at = 0; at < count; at += 8) most = vec::max(load_padded(values, at, count), most);
        float lanes[8];
        vec::store(lanes, most);
        float out = lanes[0];
        for (int i = 1; i < 8; ++i) out = lanes[i] > out ? lanes[i] : out;
        return out;
    }

    NoiseKey key_;
    float max_;
    double scale_;
    float least_logit_ = least_finite;
    std::int64_t best_ = 0, token_ = -1;
    std::uint32_t words_[4][calls], least_word_ = 0;
};

}  // namespace penstock::PENSTOCK_ISA
