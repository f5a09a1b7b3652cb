/* A library whose `pread` precedes libc's, and calls it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>

int own_calls;

ssize_t pread(int fd, void *memory, size_t bytes, off_t offset)
{
	ssize_t (*next)(int, void *, size_t, off_t) = dlsym(dlopen("libc.so.6", RTLD_NOW), "pread");
	own_calls++;
	return next(fd, memory, bytes, offset);
}

ssize_t pread64(int fd, void *memory, size_t bytes, off_t offset)
{
	ssize_t (*next)(int, void *, size_t, off_t) = dlsym(dlopen("libc.so.6", RTLD_NOW), "pread64");
	own_calls++;
	return next(fd, memory, bytes, offset);
}
