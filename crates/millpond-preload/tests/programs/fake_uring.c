/* A library with the functions that set up rings of io_uring, as far as the library under test notices them. */
#include <stddef.h>

int io_uring_queue_init(unsigned entries, void *ring, unsigned flags)
{
	return ring == NULL || entries != 8 || flags != 0;
}

int io_uring_queue_init_params(unsigned entries, void *ring, void *params)
{
	return ring == NULL || params == NULL || entries != 8;
}

int io_uring_queue_init_mem(unsigned entries, void *ring, void *params, void *memory, size_t bytes)
{
	return ring == NULL || params == NULL || memory == NULL || bytes == 0 || entries != 8;
}
