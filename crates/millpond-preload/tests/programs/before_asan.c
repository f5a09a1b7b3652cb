/*
 * Functions that are loaded before AddressSanitizer's runtime if the library under test has its own dlsym.
 *
 * dlsym and dlvsym of libc: the runtime calls them before instrumented code may run. Each is a jump, as they look at
 * their caller's address. DLSYM and DLVSYM are their distances in bytes from a function that no library replaces.
 *
 * aligned_alloc as in glibc, for any size: coreutils asks for sizes that are no multiple of the alignment, which the
 * runtime's function refuses.
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
