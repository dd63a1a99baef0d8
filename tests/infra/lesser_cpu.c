/* Preloaded into a program, makes the CPU report fewer vector extensions than it has.
 *
 * HEADRACE_CPU names the CPU to pretend: avx2, avx2-vnni, avx512, avx512-bf16. Without it, nothing changes.
 *
 * lesser_cpu.py writes copies of OpenVINO's libraries in which UD2 stands for each CPUID. The handler of SIGILL executes
 * CPUID for the program and clears the bits of the extensions to hide. The libraries then choose the kernels of the
 * lesser CPU, which this CPU runs at full speed. /proc/cpuinfo and other libraries still show what is there.
 *
 * The handler must stay: a program's own handler of SIGILL is ignored. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

#define BIT(number) (1u << (number))

typedef int sigaction_function(int, const struct sigaction *, struct sigaction *);

/* What to hide. Each CPU of the list has what those before it have. */
enum cpu { AVX2, AVX2_VNNI, AVX512, AVX512_BF16, WHOLE };
static const char *const NAMES[] = {"avx2", "avx2-vnni", "avx512", "avx512-bf16"};
static enum cpu pretended = WHOLE;

static void hide(uint32_t leaf, uint32_t subleaf, uint32_t *a, uint32_t *b, uint32_t *c, uint32_t *d) {
    if (leaf == 7 && subleaf == 0) {
        *d &= ~(BIT(22) | BIT(24) | BIT(25)); /* AMX: bf16, tiles, int8 */
        *d &= ~BIT(23);                       /* AVX-512 fp16 */
        if (pretended < AVX512) {
            *b &= ~(BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31));
            *c &= ~(BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14));
            *d &= ~(BIT(2) | BIT(3) | BIT(8));
        }
    } else if (leaf == 7 && subleaf == 1) {
        *a &= ~BIT(21);                                     /* AMX fp16 */
        *d &= ~(BIT(4) | BIT(5) | BIT(8) | BIT(10) | BIT(19)); /* AVX-VNNI-INT8, NE-CONVERT, AMX complex, INT16, AVX10 */
        if (pretended < AVX512_BF16) *a &= ~BIT(5);
        if (pretended < AVX512) *a &= ~BIT(23);   /* AVX-IFMA */
        if (pretended != AVX2_VNNI) *a &= ~BIT(4); /* AVX-VNNI, which servers with AVX-512 of old do not have */
    } else if (leaf == 0xd && subleaf == 0) {
        *a &= ~(BIT(17) | BIT(18));
        if (pretended < AVX512) *a &= ~(BIT(5) | BIT(6) | BIT(7));
    } else if (leaf == 0x1d || leaf == 0x1e) {
        *a = *b = *c = *d = 0;
    }
}

static sigaction_function *real_sigaction(void) {
    return (sigaction_function *)dlsym(RTLD_NEXT, "sigaction");
}

static void on_illegal(int number, siginfo_t *info, void *context) {
    (void)info;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *code = (const uint8_t *)registers[REG_RIP];
    if (code[0] != 0x0f || code[1] != 0x0b) {
        /* A real fault: let it happen again, and end the program. */
        signal(number, SIG_DFL);
        return;
    }
    uint32_t leaf = registers[REG_RAX], subleaf = registers[REG_RCX], a, b, c, d;
    __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "0"(leaf), "2"(subleaf));
    hide(leaf, subleaf, &a, &b, &c, &d);
    registers[REG_RAX] = a;
    registers[REG_RBX] = b;
    registers[REG_RCX] = c;
    registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}

int sigaction(int number, const struct sigaction *action, struct sigaction *old) {
    if (number == SIGILL && action != NULL && pretended != WHOLE) {
        if (old != NULL) memset(old, 0, sizeof *old);
        return 0;
    }
    return real_sigaction()(number, action, old);
}

__attribute__((constructor)) static void pretend(void) {
    const char *name = getenv("HEADRACE_CPU");
    if (name == NULL) return;
    for (int cpu = AVX2; cpu < WHOLE; cpu++)
        if (strcmp(name, NAMES[cpu]) == 0) pretended = cpu;
    struct sigaction action = {0};
    action.sa_sigaction = on_illegal;
    /* Not on the alternate stack: OpenVINO maps one for each plugin that is loaded, and when they go in another order than
     * they came, the one that is left is unmapped. */
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    if (pretended == WHOLE || real_sigaction()(SIGILL, &action, NULL) != 0) {
        fprintf(stderr, "cannot pretend the CPU %s\n", name);
        _exit(77);
    }
}
