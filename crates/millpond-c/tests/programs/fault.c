/* Inaccessible memory in a program with a fault handler, and calls by that handler. x86-64. */
#define _GNU_SOURCE
#include "check.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

static struct millpond_file file;
static volatile int64_t in_handler;
static volatile int faults;

static void resume(int signal, siginfo_t *info, void *context) {
    greg_t *at = &((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
    uintptr_t next = millpond_fault_resume_address((uintptr_t)*at);
    (void)signal, (void)info;
    CHECK(next != 0);
    if (faults++ == 0)
        in_handler = millpond_len(file);
    *at = (greg_t)next;
}

int main(void) {
    struct millpond_engine engine = new_engine();
    struct sigaction action;
    char bytes[4096] = "frog";
    void *bad = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    memset(&action, 0, sizeof action);
    action.sa_sigaction = resume;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);

    file = open_file(engine, "faults", O_RDWR | O_CREAT);
    RETURNS(4096, millpond_write(file, bytes, 4096, 0));
    RETURNS(4096, millpond_read(file, bytes, 4096, 0));
    RETURNS(-EFAULT, millpond_read(file, bad, 4096, 0));
    CHECK(faults > 0);
    RETURNS(-EDEADLK, in_handler); /* the handler interrupted a call */
    RETURNS(-EFAULT, millpond_write(file, bad, 100, 0));
    RETURNS(4096, millpond_len(file)); /* the file still works */
    RETURNS(4, millpond_read(file, bytes, 4, 0));
    CHECK(memcmp(bytes, "frog", 4) == 0);
    RETURNS(0, millpond_close(file));
    RETURNS(0, millpond_engine_destroy(engine));
    return 0;
}
