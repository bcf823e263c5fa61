/* SPDX-License-Identifier: MIT
 *
 * Every reduction against a plain reference that shares no code with src/reduce: one element at a
 * time, 16-bit floats decoded and encoded through ldexp. Data depends on source and position and is
 * rich in NaN, infinities, zeros of both signs and denormals; all comparisons are of bytes. With
 * the argument `bench` it prints throughput instead.
 */
/* limit: 240 s */
/* sanitize: not thread */
/* It has one thread, and takes six minutes there. */
#include "reduce/reduce.h"
#include "support/check.h"

#include <math.h>
#include <stdint.h>
#include <time.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#define MAX_SRCS 8
#define MAX_SIZE 16
#define N_OF(array) (sizeof(array) / sizeof((array)[0]))

/* ---- 16-bit floats, slowly ---- */

struct format {
    int mantissa_bits, min_exponent, max_exponent;
};
static const struct format half = {10, -14, 15};
static const struct format brain = {7, -126, 127};

static double decode(struct format format, uint16_t bits)
{
    const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
    const int exponent = (bits & 0x7fff) >> format.mantissa_bits;
    const double sign = bits & 0x8000 ? -1.0 : 1.0;
    if (exponent == format.max_exponent - format.min_exponent + 2)
        return mantissa ? (double)NAN : sign * (double)INFINITY;
    if (exponent == 0)
        return sign * ldexp(mantissa, format.min_exponent - format.mantissa_bits);
    return sign * ldexp(mantissa + (1 << format.mantissa_bits),
                        exponent - 1 + format.min_exponent - format.mantissa_bits);
}

static uint16_t encode(struct format format, double value)
{
    const int one = 1 << format.mantissa_bits;
    const int infinity = (format.max_exponent - format.min_exponent + 2) << format.mantissa_bits;
    const int sign = signbit(value) ? 0x8000 : 0;
    if (isnan(value))
        return (uint16_t)(infinity + one / 2);
    if (isinf(value))
        return (uint16_t)(infinity | sign);
    if (value == 0)
        return (uint16_t)sign;
    int exponent = ilogb(value) < format.min_exponent ? format.min_exponent : ilogb(value);
    int mantissa = (int)nearbyint(ldexp(fabs(value), format.mantissa_bits - exponent));
    if (mantissa == 2 * one) {
        mantissa = one;
        exponent++;
    }
    if (exponent > format.max_exponent)
        return (uint16_t)(infinity | sign);
    if (mantissa < one)
        return (uint16_t)(mantissa | sign);
    return (uint16_t)(((exponent - format.min_exponent) * one + mantissa) | sign);
}

/* ---- the reference, one element at a time ---- */

#define DEFINE_REFERENCE(name, real, nan_bits, bits_type)                  \
    static real name##_settle(real x)                                      \
    {                                                                      \
        const bits_type bits = nan_bits;                                   \
        if (isnan(x))                                                      \
            memcpy(&x, &bits, sizeof(x));                                  \
        return x;                                                          \
    }                                                                      \
    static real name(mccl_op op, const real *x, int n, int divisor)        \
    {                                                                      \
        real total = x[0];                                                 \
        for (int i = 1; i < n; i++) {                                      \
            const bool is_min = op == MCCL_MIN;                            \
            if (op == MCCL_PROD)                                           \
                total *= x[i];                                             \
            else if (op != MCCL_MIN && op != MCCL_MAX)                     \
                total += x[i];                                             \
            else if (isnan(total) || isnan(x[i]))                          \
                total = (real)NAN;                                         \
            else if (total == x[i])                                        \
                total = (signbit(total) != 0) == is_min ? total : x[i];    \
            else                                                           \
                total = (total < x[i]) == is_min ? total : x[i];           \
        }                                                                  \
        return name##_settle(divisor > 1 ? total / (real)divisor : total); \
    }
DEFINE_REFERENCE(reference_float, float, 0x7fc00000u, uint32_t)
DEFINE_REFERENCE(reference_double, double, 0x7ff8000000000000u, uint64_t)

static void reference_complex(mccl_op op, mccl_dtype dtype, const void *const *srcs, int n,
                              int divisor, void *out)
{
    const bool wide = dtype == MCCL_COMPLEX128;
    double re[MAX_SRCS] = {0}, im[MAX_SRCS] = {0};
    float re_f[MAX_SRCS] = {0}, im_f[MAX_SRCS] = {0};
    for (int i = 0; i < n; i++) {
        memcpy(&re[i], srcs[i], 8);
        memcpy(&re_f[i], srcs[i], 4);
        memcpy(wide ? (void *)&im[i] : (void *)&im_f[i], (const char *)srcs[i] + (wide ? 8 : 4),
               wide ? 8 : 4);
    }
    if (op == MCCL_PROD) {
        for (int i = 1; i < n && wide; i++) {
            const double next = re[0] * re[i] - im[0] * im[i];
            im[0] = reference_double_settle(re[0] * im[i] + im[0] * re[i]);
            re[0] = reference_double_settle(next);
        }
        for (int i = 1; i < n && !wide; i++) {
            const float next = re_f[0] * re_f[i] - im_f[0] * im_f[i];
            im_f[0] = reference_float_settle(re_f[0] * im_f[i] + im_f[0] * re_f[i]);
            re_f[0] = reference_float_settle(next);
        }
        n = 1;
    }
    if (wide) {
        const double result[2] = {reference_double(op, re, n, divisor),
                                  reference_double(op, im, n, divisor)};
        memcpy(out, result, 16);
    } else {
        const float result[2] = {reference_float(op, re_f, n, divisor),
                                 reference_float(op, im_f, n, divisor)};
        memcpy(out, result, 8);
    }
}

/* Integers as 64-bit patterns, sign-extended if the type is signed. */
static uint64_t load_integer(const void *src, size_t size, bool is_signed)
{
    uint64_t value = 0;
    for (size_t i = 0; i < size; i++)
        value |= (uint64_t)((const uint8_t *)src)[i] << (8 * i);
    const uint64_t sign = (uint64_t)1 << (8 * size - 1);
    return is_signed ? (value ^ sign) - sign : value;
}

static uint64_t combine_integers(mccl_op op, uint64_t a, uint64_t b, bool is_signed)
{
    const bool less = is_signed ? (int64_t)a < (int64_t)b : a < b;
    switch (op) {
    case MCCL_SUM:
        return a + b;
    case MCCL_PROD:
        return a * b;
    case MCCL_MIN:
        return less ? a : b;
    case MCCL_MAX:
        return less ? b : a;
    case MCCL_BAND:
        return a & b;
    case MCCL_BOR:
        return a | b;
    default:
        return a ^ b;
    }
}

static void reference_integer(mccl_op op, mccl_dtype dtype, const void *const *srcs, int n,
                              void *out)
{
    const size_t size = mccl_dtype_size(dtype);
    const bool is_signed =
        dtype == MCCL_INT8 || dtype == MCCL_INT16 || dtype == MCCL_INT32 || dtype == MCCL_INT64;
    uint64_t total = load_integer(srcs[0], size, is_signed);
    for (int i = 1; i < n; i++) {
        total = combine_integers(op, total, load_integer(srcs[i], size, is_signed), is_signed);
        uint8_t cut[8];
        for (size_t k = 0; k < size; k++)
            cut[k] = (uint8_t)(total >> (8 * k));
        total = load_integer(cut, size, is_signed);
    }
    for (size_t k = 0; k < size; k++)
        ((uint8_t *)out)[k] = (uint8_t)(total >> (8 * k));
}

static void reference_bool(mccl_op op, const void *const *srcs, int n, uint8_t *out)
{
    int n_true = 0;
    for (int i = 0; i < n; i++)
        n_true += *(const uint8_t *)srcs[i] != 0;
    if (op == MCCL_BXOR)
        *out = n_true % 2 == 1;
    else if (op == MCCL_PROD || op == MCCL_MIN || op == MCCL_BAND)
        *out = n_true == n;
    else
        *out = n_true > 0;
}

/* One element; srcs point at it in each source. */
static void reference(mccl_op op, mccl_dtype dtype, const void *const *srcs, int n, int divisor,
                      void *out)
{
    float f[MAX_SRCS] = {0};
    double d[MAX_SRCS] = {0};
    uint16_t h;
    switch (dtype) {
    case MCCL_FLOAT32:
        for (int i = 0; i < n; i++)
            memcpy(&f[i], srcs[i], 4);
        f[0] = reference_float(op, f, n, divisor);
        memcpy(out, f, 4);
        break;
    case MCCL_FLOAT64:
        for (int i = 0; i < n; i++)
            memcpy(&d[i], srcs[i], 8);
        d[0] = reference_double(op, d, n, divisor);
        memcpy(out, d, 8);
        break;
    case MCCL_FLOAT16:
    case MCCL_BFLOAT16:
        for (int i = 0; i < n; i++) {
            memcpy(&h, srcs[i], 2);
            f[i] = (float)decode(dtype == MCCL_FLOAT16 ? half : brain, h);
        }
        h = encode(dtype == MCCL_FLOAT16 ? half : brain,
                   (double)reference_float(op, f, n, divisor));
        memcpy(out, &h, 2);
        break;
    case MCCL_COMPLEX64:
    case MCCL_COMPLEX128:
        reference_complex(op, dtype, srcs, n, divisor, out);
        break;
    case MCCL_BOOL:
        reference_bool(op, srcs, n, out);
        break;
    default:
        reference_integer(op, dtype, srcs, n, out);
        break;
    }
}

/* ---- data ---- */

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* A number whose bits are random, a small integer, or one of the odd values, as `hash` says. */
static double number(uint64_t hash)
{
    static const double odd[] = {0.0,       -0.0,      1.0,     -1.0,      0x1p-149,
                                 -0x1p-140, 0x1p-1060, 0x1p-24, -0x1p-20,  0x1p-126,
                                 65504.0,   -65504.0,  0x1p127, -0x1p1000, 0x1.fep-15};
    const uint64_t pick = hash >> 8;
    switch (hash & 7) {
    case 0:
        return odd[pick % N_OF(odd)];
    case 1:
        return pick % 5 == 0 ? (double)NAN : pick % 2 ? (double)INFINITY : -(double)INFINITY;
    case 2:
    case 3:
        return ldexp((double)(int64_t)(pick >> 3) * 0x1p-50, (int)(pick % 40) - 30);
    default:
        return (double)((int)(pick % 2001) - 1000);
    }
}

static void put_number(mccl_dtype dtype, void *to, double value)
{
    const float f = (float)value;
    const uint16_t h = encode(dtype == MCCL_FLOAT16 ? half : brain, value);
    const bool is_half = dtype == MCCL_FLOAT16 || dtype == MCCL_BFLOAT16;
    if (is_half)
        memcpy(to, &h, 2);
    else if (dtype == MCCL_FLOAT32 || dtype == MCCL_COMPLEX64)
        memcpy(to, &f, 4);
    else
        memcpy(to, &value, 8);
}

static bool is_floating(mccl_dtype dtype)
{
    return dtype <= MCCL_BFLOAT16 || dtype == MCCL_COMPLEX64 || dtype == MCCL_COMPLEX128;
}

static void fill(mccl_dtype dtype, uint8_t *to, size_t count, int source)
{
    const size_t size = mccl_dtype_size(dtype);
    const bool pairs = dtype == MCCL_COMPLEX64 || dtype == MCCL_COMPLEX128;
    for (size_t i = 0; i < count; i++) {
        const uint64_t hash = mix(i * 16 + (uint64_t)source + 1);
        const uint64_t other = mix(hash);
        uint8_t *const at = to + i * size;
        if (!is_floating(dtype) ||
            hash % 9 == 8) { /* any bits: NaN payloads, signalling ones too */
            memcpy(at, &hash, size < 8 ? size : 8);
            if (size > 8)
                memcpy(at + 8, &other, 8);
            if (dtype == MCCL_BOOL && hash % 2)
                *at = 0;
        } else {
            put_number(dtype, at, number(hash));
            if (pairs)
                put_number(dtype, at + size / 2, number(other));
        }
    }
}

/* ---- the matrix ---- */

struct data {
    mccl_op op;
    mccl_dtype dtype;
    int n_srcs, divisor;
    size_t count, bytes;
    uint8_t *srcs[MAX_SRCS]; /* as filled */
    uint8_t *expected;
};

static void *need(size_t size)
{
    void *const memory = malloc(size ? size : 1);
    CHECK(memory);
    return memory;
}

static void describe_failure(const struct data *data, size_t offset, int alias, const char *what,
                             size_t at)
{
    CHECK_FAIL("%s of %s, %d sources, count %zu, divisor %d, byte offset %zu, dst = source %d: %s "
               "at byte %zu",
               mccl_op_name(data->op), mccl_dtype_name(data->dtype), data->n_srcs, data->count,
               data->divisor, offset, alias, what, at);
}

static void expect_bytes(const struct data *data, size_t offset, int alias, const char *what,
                         const uint8_t *got, const uint8_t *expected, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        if (got[i] == expected[i])
            continue;
        const size_t width = mccl_dtype_size(data->dtype);
        const size_t start = i - i % width;
        for (size_t k = 0; k < width && start + k < size; k++)
            fprintf(stderr, "got %02x expected %02x\n", got[start + k], expected[start + k]);
        describe_failure(data, offset, alias, what, i);
    }
}

/* `alias`: which source dst is, or -1. Buffers are of the exact size, so that a sanitizer sees
 * reads outside. */
static void run_variant(const struct data *data, size_t offset, int alias)
{
    static const uint8_t guard[8] = {0xa5, 0x5a, 1, 2, 3, 4, 5, 6};
    uint8_t *memory[MAX_SRCS];
    const void *srcs[MAX_SRCS];
    for (int i = 0; i < data->n_srcs; i++) {
        memory[i] = need(data->bytes + offset);
        memcpy(memory[i] + offset, data->srcs[i], data->bytes);
        srcs[i] = memory[i] + offset;
    }
    uint8_t *const own = need(data->bytes + offset + sizeof(guard));
    memset(own, 0xee, data->bytes + offset);
    memcpy(own + offset + data->bytes, guard, sizeof(guard));
    uint8_t *const dst = alias < 0 ? own + offset : memory[alias] + offset;

    reduce_run(data->op, data->dtype, dst, srcs, data->n_srcs, data->count, data->divisor);

    expect_bytes(data, offset, alias, "wrong result", dst, data->expected, data->bytes);
    expect_bytes(data, offset, alias, "wrote past the end", own + offset + data->bytes, guard,
                 sizeof(guard));
    for (int i = 0; i < data->n_srcs; i++) {
        if (i != alias)
            expect_bytes(data, offset, alias, "changed a source", memory[i] + offset, data->srcs[i],
                         data->bytes);
        free(memory[i]);
    }
    free(own);
}

static void run_case(mccl_op op, mccl_dtype dtype, int n_srcs, size_t count, int divisor)
{
    const size_t size = mccl_dtype_size(dtype);
    struct data data = {.op = op,
                        .dtype = dtype,
                        .n_srcs = n_srcs,
                        .divisor = divisor,
                        .count = count,
                        .bytes = count * size};
    for (int i = 0; i < n_srcs; i++) {
        data.srcs[i] = need(data.bytes);
        fill(dtype, data.srcs[i], count, i);
    }
    data.expected = need(data.bytes);
    for (size_t i = 0; i < count; i++) {
        const void *elements[MAX_SRCS];
        for (int s = 0; s < n_srcs; s++)
            elements[s] = data.srcs[s] + i * size;
        reference(op, dtype, elements, n_srcs, divisor, data.expected + i * size);
    }
    const bool is_large =
        count > 10000; /* where variants cost time and tell nothing that small ones do not */
    for (int alias = -1; alias < n_srcs; alias += is_large ? n_srcs : 1) {
        run_variant(&data, 0, alias);
        run_variant(&data, 1, alias);
        if (!is_large)
            run_variant(&data, size / 2, alias);
    }
    for (int i = 0; i < n_srcs; i++)
        free(data.srcs[i]);
    free(data.expected);
}

static void test_matrix(void)
{
    static const size_t counts[] = {0, 1, 3, 17, 255, 4097, 70001};
    static const int n_srcs[] = {1, 2, 3, 5, 8};
    for (mccl_dtype dtype = 0; dtype < MCCL_N_DTYPES; dtype++) {
        for (mccl_op op = 0; op < MCCL_N_OPS; op++) {
            if (!reduce_supports(op, dtype))
                continue;
            for (size_t c = 0; c < N_OF(counts); c++) {
                for (size_t n = 0; n < N_OF(n_srcs); n++) {
                    run_case(op, dtype, n_srcs[n], counts[c], op == MCCL_AVG ? n_srcs[n] : 1);
                    if (op == MCCL_AVG && counts[c] <= 4097)
                        run_case(op, dtype, n_srcs[n], counts[c], 7);
                }
            }
        }
    }
}

/* Columns in the order of MCCL_DTYPES. */
static void test_supports(void)
{
    static const char *const expected[MCCL_N_OPS] = {
        [MCCL_SUM] = "ffff iiiiiiii b cc .....",  [MCCL_PROD] = "ffff iiiiiiii b cc .....",
        [MCCL_MIN] = "ffff iiiiiiii b .. .....",  [MCCL_MAX] = "ffff iiiiiiii b .. .....",
        [MCCL_AVG] = "ffff ........ . cc .....",  [MCCL_PREMUL_SUM] = "ffff ........ . cc .....",
        [MCCL_BAND] = ".... iiiiiiii b .. .....", [MCCL_BOR] = ".... iiiiiiii b .. .....",
        [MCCL_BXOR] = ".... iiiiiiii b .. .....",
    };
    for (mccl_op op = 0; op < MCCL_N_OPS; op++) {
        const char *at = expected[op];
        for (mccl_dtype dtype = 0; dtype < MCCL_N_DTYPES; dtype++, at++) {
            at += *at == ' ';
            if (reduce_supports(op, dtype) != (*at != '.') ||
                mccl_op_supports(op, dtype) != (*at != '.'))
                CHECK_FAIL("%s of %s: support is not as documented", mccl_op_name(op),
                           mccl_dtype_name(dtype));
        }
        CHECK_EQ_STR(at, "");
    }
    CHECK(!reduce_supports(MCCL_N_OPS, MCCL_FLOAT32));
    CHECK(!reduce_supports(MCCL_SUM, MCCL_N_DTYPES));
}

/* ---- conversions ---- */

static void expect_narrow(mccl_dtype dtype, const float *values, size_t n)
{
    static uint16_t got[1 << 16];
    CHECK(n <= N_OF(got));
    reduce_narrow(dtype, got, values, n);
    for (size_t i = 0; i < n; i++) {
        const uint16_t expected = encode(dtype == MCCL_FLOAT16 ? half : brain, (double)values[i]);
        if (got[i] != expected)
            CHECK_FAIL("%s from %a: got 0x%04x, expected 0x%04x", mccl_dtype_name(dtype),
                       (double)values[i], got[i], expected);
    }
}

/* All 65536 patterns widened and narrowed back; then halfway between neighbours and one float32 to
 * each side. */
static void test_conversions(mccl_dtype dtype)
{
    static uint16_t all[1 << 16];
    static float wide[1 << 16], near[1 << 16];
    const struct format format = dtype == MCCL_FLOAT16 ? half : brain;
    for (size_t i = 0; i < N_OF(all); i++)
        all[i] = (uint16_t)i;
    reduce_widen(dtype, wide, all, N_OF(all));
    for (size_t i = 0; i < N_OF(all); i++) {
        const float expected = (float)decode(format, all[i]);
        if (isnan(expected) ? !isnan(wide[i]) : memcmp(&expected, &wide[i], 4) != 0)
            CHECK_FAIL("%s 0x%04zx: got %a, expected %a", mccl_dtype_name(dtype), i,
                       (double)wide[i], (double)expected);
    }
    expect_narrow(dtype, wide, N_OF(wide));
    for (int side = -1; side <= 1; side++) {
        for (size_t i = 0; i < N_OF(all); i++) {
            const float next = wide[(i + 1) % N_OF(all)];
            const float middle =
                isinf(next) ? 1.0f + wide[i] * (1 + 0x1p-9f) : wide[i] / 2 + next / 2;
            near[i] = side == 0 ? middle : nextafterf(middle, (float)side * INFINITY);
        }
        expect_narrow(dtype, near, N_OF(near));
    }
    for (uint64_t round = 0; round < 20; round++) { /* any float32 */
        for (size_t i = 0; i < N_OF(near); i++) {
            const uint32_t bits = (uint32_t)mix(round << 32 | i);
            memcpy(&near[i], &bits, 4);
        }
        expect_narrow(dtype, near, N_OF(near));
    }
    const float limits[] = {65504.0f,        65519.996f,   65520.0f,        65536.0f,
                            0x1p-24f,        0x1p-25f,     0x1.000002p-25f, 0x1.8p-24f,
                            0x1.ffcp-15f,    0x1.ffep-15f, 3.3895314e38f,   3.3961775e38f,
                            0x1.fffffep127f, -0.0f};
    expect_narrow(dtype, limits, N_OF(limits));
}

static void test_scale(mccl_dtype dtype, double factor, bool in_place, size_t count)
{
    const size_t size = mccl_dtype_size(dtype);
    const bool pairs = dtype == MCCL_COMPLEX64 || dtype == MCCL_COMPLEX128;
    const size_t parts = pairs ? 2 * count : count;
    const size_t part_size = pairs ? size / 2 : size;
    uint8_t *const src = need(count * size + 1);
    uint8_t *const own = need(count * size + 1);
    uint8_t *const expected = need(count * size);
    fill(dtype, src + 1, count, 3);
    for (size_t i = 0; i < parts; i++) {
        const void *const at = src + 1 + i * part_size;
        float f;
        double d;
        uint16_t h;
        if (part_size == 2) {
            memcpy(&h, at, 2);
            h = encode(
                dtype == MCCL_FLOAT16 ? half : brain,
                (double)((float)decode(dtype == MCCL_FLOAT16 ? half : brain, h) * (float)factor));
            memcpy(expected + i * 2, &h, 2);
        } else if (part_size == 4) {
            memcpy(&f, at, 4);
            f = reference_float_settle(f * (float)factor);
            memcpy(expected + i * 4, &f, 4);
        } else {
            memcpy(&d, at, 8);
            d = reference_double_settle(d * factor);
            memcpy(expected + i * 8, &d, 8);
        }
    }
    uint8_t *const dst = in_place ? src + 1 : own + 1;
    reduce_scale(dtype, dst, src + 1, count, factor);
    CHECK_EQ_MEM(dst, expected, count * size);
    free(src);
    free(own);
    free(expected);
}

/* ---- floating-point mode ---- */

/* Flushes denormals and rounds down, as a hostile caller may. False where this machine's way is not
 * known here. */
static bool set_hostile_mode(void)
{
#if defined(__x86_64__)
    _mm_setcsr(0x1f80 | 0x8040 | 0x2000);
    return true;
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0x01000000 | 0x00800000) : "memory");
    return true;
#else
    return false;
#endif
}

static uint64_t read_mode(void)
{
#if defined(__x86_64__)
    return _mm_getcsr();
#elif defined(__aarch64__)
    uint64_t fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr) : : "memory");
    return fpcr;
#else
    return 0;
#endif
}

static void restore_mode(void)
{
#if defined(__x86_64__)
    _mm_setcsr(0x1f80);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0) : "memory");
#endif
}

/* Results do not depend on the caller's mode, and the caller finds its mode, status flags included,
 * as it was. */
static void test_mode(mccl_dtype dtype, mccl_op op, int n_srcs, int divisor)
{
    enum { COUNT = 1000 };
    static uint8_t srcs[MAX_SRCS][COUNT * MAX_SIZE], plain[COUNT * MAX_SIZE],
        hostile[COUNT * MAX_SIZE];
    static uint16_t narrow_plain[COUNT], narrow_hostile[COUNT];
    static float wide_plain[COUNT], wide_hostile[COUNT];
    const void *pointers[MAX_SRCS];
    const size_t size = COUNT * mccl_dtype_size(dtype);
    for (int i = 0; i < n_srcs; i++) {
        fill(dtype, srcs[i], COUNT, i);
        for (size_t k = 0; k < COUNT; k += 3) /* every third a denormal */
            put_number(dtype, srcs[i] + k * mccl_dtype_size(dtype),
                       (double)(i + 1 + (int)k) * (dtype == MCCL_FLOAT64   ? 0x1p-1074
                                                   : dtype == MCCL_FLOAT16 ? 0x1p-24
                                                                           : 0x1p-133));
        pointers[i] = srcs[i];
    }
    const bool is_half = dtype == MCCL_FLOAT16 || dtype == MCCL_BFLOAT16;
    reduce_run(op, dtype, plain, pointers, n_srcs, COUNT, divisor);
    if (is_half) {
        reduce_widen(dtype, wide_plain, srcs[0], COUNT);
        reduce_narrow(dtype, narrow_plain, wide_plain, COUNT);
    }
    if (!set_hostile_mode())
        return;
    const uint64_t before = read_mode();
    reduce_run(op, dtype, hostile, pointers, n_srcs, COUNT, divisor);
    const uint64_t after_run = read_mode();
    if (is_half) {
        reduce_widen(dtype, wide_hostile, srcs[0], COUNT);
        reduce_narrow(dtype, narrow_hostile, wide_hostile, COUNT);
    }
    const uint64_t after_all = read_mode();
    restore_mode();
    CHECK_EQ_U64(after_run, before);
    CHECK_EQ_U64(after_all, before);
    CHECK_EQ_MEM(hostile, plain, size);
    if (is_half) {
        CHECK_EQ_MEM(wide_hostile, wide_plain, sizeof(wide_plain));
        CHECK_EQ_MEM(narrow_hostile, narrow_plain, sizeof(narrow_plain));
    }
    reduce_scale(dtype, plain, srcs[0], COUNT, 0.3);
    set_hostile_mode();
    reduce_scale(dtype, hostile, srcs[0], COUNT, 0.3);
    const uint64_t after_scale = read_mode();
    restore_mode();
    CHECK_EQ_U64(after_scale, before);
    CHECK_EQ_MEM(hostile, plain, size);
}

/* ---- NaN, by hand ---- */

/* A NaN of any kind, at any source and position, gives the canonical one there and nowhere else. */
static void test_nan(void)
{
    enum { COUNT = 37, SRCS = 4 };
    static const uint32_t nans[] = {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xff812345u,
                                    0x7fffffffu};
    static const mccl_op ops[] = {MCCL_SUM, MCCL_PROD, MCCL_MIN, MCCL_MAX};
    for (size_t o = 0; o < N_OF(ops); o++) {
        for (int n_srcs = 1; n_srcs <= SRCS; n_srcs++) {
            for (int where = 0; where < n_srcs; where++) {
                uint32_t bits[SRCS][COUNT], dst[COUNT];
                const void *srcs[SRCS] = {bits[0], bits[1], bits[2], bits[3]};
                for (int s = 0; s < SRCS; s++)
                    for (int i = 0; i < COUNT; i++)
                        bits[s][i] = s == where && i % 2 ? nans[i % (int)N_OF(nans)] : 0x3f800000u;
                reduce_run(ops[o], MCCL_FLOAT32, dst, srcs, n_srcs, COUNT, 1);
                for (int i = 0; i < COUNT; i++) {
                    const float sum = ops[o] == MCCL_SUM ? (float)n_srcs : 1.0f;
                    uint32_t expected = 0x7fc00000u;
                    if (i % 2 == 0)
                        memcpy(&expected, &sum, 4);
                    CHECK_EQ_U64(dst[i], expected);
                }
            }
        }
    }
}

/* ---- throughput ---- */

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void bench(mccl_dtype dtype, mccl_op op, int n_srcs)
{
    const size_t bytes = (size_t)4 << 20;
    const size_t count = bytes / mccl_dtype_size(dtype);
    const void *srcs[MAX_SRCS];
    uint8_t *const dst = need(bytes);
    double best = 1e9;
    for (int i = 0; i < n_srcs; i++) {
        uint8_t *const src = need(bytes);
        memset(src, 0x3c + i, bytes);
        srcs[i] = src;
    }
    for (int round = 0; round < 30; round++) {
        const double start = seconds();
        reduce_run(op, dtype, dst, srcs, n_srcs, count, 1);
        const double took = seconds() - start;
        best = took < best ? took : best;
    }
    printf("%-9s %-5s %d sources of 4 MiB: %6.2f GB/s of result, %6.2f GB/s read and written\n",
           mccl_dtype_name(dtype), mccl_op_name(op), n_srcs, (double)bytes / best * 1e-9,
           (double)bytes * (n_srcs + 1) / best * 1e-9);
}

static void test_all(void)
{
    static const mccl_dtype floats[] = {MCCL_FLOAT32,  MCCL_FLOAT64,   MCCL_FLOAT16,
                                        MCCL_BFLOAT16, MCCL_COMPLEX64, MCCL_COMPLEX128};
    static const double factors[] = {0.5, -3.0, 1.0 / 3.0, 0.0, 1e-30};
    test_supports();
    test_conversions(MCCL_FLOAT16);
    test_conversions(MCCL_BFLOAT16);
    for (size_t i = 0; i < N_OF(floats); i++) {
        for (size_t k = 0; k < N_OF(factors); k++) {
            test_scale(floats[i], factors[k], false, 1003);
            test_scale(floats[i], factors[k], true, 1003);
        }
        test_scale(floats[i], 2.0, false, 0);
        test_mode(floats[i], MCCL_SUM, 2, 1);
        test_mode(floats[i], MCCL_AVG, 2, 2);
        test_mode(floats[i], MCCL_PROD, 3, 1);
        test_mode(floats[i], MCCL_SUM, 1, 1);
    }
    test_nan();
    test_matrix();
}

int main(int argc, char **argv)
{
    static const char *const sets[] = {"generic", "avx2", "avx512"};
    static const mccl_dtype dtypes[] = {MCCL_FLOAT32,  MCCL_FLOAT64, MCCL_FLOAT16,
                                        MCCL_BFLOAT16, MCCL_INT32,   MCCL_INT64};
    const bool benchmark = argc > 1 && strcmp(argv[1], "bench") == 0;
    for (size_t k = 0; k < N_OF(sets); k++) {
        if (!reduce_use_kernel_set(sets[k]))
            continue;
        CHECK(strcmp(reduce_kernel_set(), sets[k]) == 0);
        printf("kernels: %s\n", sets[k]);
        if (!benchmark)
            test_all();
        for (size_t i = 0; benchmark && i < N_OF(dtypes); i++) {
            bench(dtypes[i], MCCL_SUM, 2);
            bench(dtypes[i], MCCL_SUM, 4);
            bench(dtypes[i], MCCL_MAX, 2);
        }
    }
    return 0;
}
