/*
 * What is loaded before AddressSanitizer's runtime, where the library under test has its own dlsym.
 *
 * dlsym and dlvsym as libc has them: the runtime calls them before code that is instrumented may run. A jump each, as
 * they look at who calls. DLSYM, DLVSYM: how far they are from a function that nobody replaces, in bytes.
 *
 * aligned_alloc as glibc has it, of any size: coreutils asks for sizes that are no multiple of the alignment, which the
 * runtime's refuses.
 */
#include <stdlib.h>

#define TEXT_OF(what) #what
#define TEXT(what) TEXT_OF(what)
#define LIBCS(name, distance)                                  \
    __asm__(".globl " name "\n.type " name ",@function\n"      \
            name ":\n"                                         \
            "mov gnu_get_libc_version@GOTPCREL(%rip), %rax\n"  \
            "add $" TEXT(distance) ", %rax\n"                  \
            "jmp *%rax\n")

LIBCS("dlsym", DLSYM);
LIBCS("dlvsym", DLVSYM);

void *aligned_alloc(size_t alignment, size_t size)
{
    void *at;
    return posix_memalign(&at, alignment, size) ? NULL : at;
}
