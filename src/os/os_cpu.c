/* SPDX-License-Identifier: MIT
 *
 * Which instructions the processor has beyond those that its architecture promises. Leaves and bits
 * are those of Intel's and AMD's manuals under CPUID and XCR0.
 */
#include "os/os.h"

#if defined(__x86_64__)

#include <cpuid.h>

#define LEAF1_ECX_OSXSAVE (1u << 27)
#define LEAF1_ECX_AVX (1u << 28)
#define LEAF1_ECX_F16C (1u << 29)
#define LEAF7_EBX_AVX2 (1u << 5)
#define LEAF7_EBX_AVX512 (1u << 16 | 1u << 17 | 1u << 30 | 1u << 31) /* F, DQ, BW, VL */
#define XCR0_AVX 0x6u                                                /* XMM and YMM registers */
#define XCR0_AVX512 0xe6u /* and masks, upper halves, upper sixteen */

static unsigned saved_registers(void)
{
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static bool has_all(unsigned bits, unsigned wanted)
{
    return (bits & wanted) == wanted;
}

bool os_cpu_has(enum os_cpu level)
{
    if (level == OS_CPU_BASELINE)
        return true;
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) ||
        !has_all(ecx, LEAF1_ECX_OSXSAVE | LEAF1_ECX_AVX | LEAF1_ECX_F16C) ||
        !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !has_all(ebx, LEAF7_EBX_AVX2))
        return false;
    if (level == OS_CPU_AVX2)
        return has_all(saved_registers(), XCR0_AVX);
    return has_all(ebx, LEAF7_EBX_AVX512) && has_all(saved_registers(), XCR0_AVX512);
}

#else

bool os_cpu_has(enum os_cpu level)
{
    return level == OS_CPU_BASELINE;
}

#endif
