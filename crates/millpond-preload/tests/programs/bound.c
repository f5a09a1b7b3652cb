/* A library that calls libc's functions: the first definitions that the dynamic linker finds for it. */
#include <unistd.h>

ssize_t bound_read(int fd, void *memory, size_t bytes, off_t offset) { return pread(fd, memory, bytes, offset); }
ssize_t bound_write(int fd, const void *memory, size_t bytes, off_t offset) { return pwrite(fd, memory, bytes, offset); }
