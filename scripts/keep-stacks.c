// Loom maps and unmaps a stack for each thread of each interleaving, which takes half of its time. Preloaded to a
// program of loom tests, this library caches the stacks of a thread for reuse:
//
//     gcc -shared -fPIC -O2 -o keep_stacks.so scripts/keep-stacks.c
#define _GNU_SOURCE
#include <stdbool.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define STACKS_MAX 32

// The stacks of this thread: a stack is freed on the thread that allocated it; other mappings go to the kernel.
static __thread struct stack {
    void *start;
    size_t len;
    bool in_use, is_guarded;
} stacks[STACKS_MAX];

static struct stack *find(void *start, size_t len, bool in_use) {
    for (int i = 0; i < STACKS_MAX; i++) {
        struct stack *stack = &stacks[i];
        if (stack->in_use == in_use && stack->len == len && (!start || stack->start == start)) return stack;
    }
    return NULL;
}

void *mmap(void *addr, size_t len, int prot, int flags, int fd, off_t offset) {
    bool is_stack = (flags & MAP_STACK) && !addr;
    struct stack *stack = is_stack ? find(NULL, len, false) : NULL;
    if (stack) {
        stack->in_use = true;
        return stack->start;
    }
    void *start = (void *)syscall(SYS_mmap, addr, len, prot, flags, fd, offset);
    if (is_stack && start != MAP_FAILED && (stack = find(NULL, 0, false)))
        *stack = (struct stack){start, len, true, false};
    return start;
}

// The guard page below a stack; a cached stack has it already.
int mprotect(void *addr, size_t len, int prot) {
    for (int i = 0; prot == PROT_NONE && i < STACKS_MAX; i++) {
        if (stacks[i].start != addr || !stacks[i].in_use) continue;
        if (stacks[i].is_guarded) return 0;
        stacks[i].is_guarded = true;
    }
    return syscall(SYS_mprotect, addr, len, prot);
}

int munmap(void *addr, size_t len) {
    struct stack *stack = find(addr, len, true);
    if (!stack) return syscall(SYS_munmap, addr, len);
    stack->in_use = false;
    return 0;
}
