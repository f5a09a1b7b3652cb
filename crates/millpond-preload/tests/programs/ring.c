/* A library that makes the system calls of io_uring itself, as liburing does, under its name. */
#include <errno.h>
#include <sys/syscall.h>

static long raw(long number, long a, long b, long c, long d)
{
	long result;
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = 0;
	register long r9 __asm__("r9") = 0;
	__asm__ volatile("syscall" : "=a"(result)
		: "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
	return result;
}

int io_uring_setup(unsigned entries, void *params)
{
	int ring = raw(SYS_io_uring_setup, entries, (long)params, 0, 0);
	errno = ring < 0 ? -ring : 0;
	return ring;
}

int own_enter(int ring, unsigned submitted, unsigned awaited, unsigned flags)
{
	return raw(SYS_io_uring_enter, ring, submitted, awaited, flags);
}
