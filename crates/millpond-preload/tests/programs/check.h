/* Common functions of the programs that check results, and print nothing if all results are the kernel's. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(condition) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #condition, errno); \
			_exit(1); \
		} \
	} while (0)

enum { PAGE = 4096, PAGES = 256 };

/* A file of PAGES pages; page i is all `first + i`. */
static void make_pages(const char *path, int first)
{
	char page[PAGE];
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);
	CHECK(fd >= 0);
	for (int i = 0; i < PAGES; i++) {
		memset(page, first + i, PAGE);
		CHECK(write(fd, page, PAGE) == PAGE);
	}
	CHECK(close(fd) == 0);
}

/* The number of repetitions at the scale of MILLPOND_TEST_SCALE; at least `min`. */
static int scaled(int count, int min)
{
	const char *scale = getenv("MILLPOND_TEST_SCALE");
	int times = scale ? (int)(count * atof(scale)) : count;
	return times > min ? times : min;
}

static int is_all(const void *memory, size_t n, int value)
{
	const unsigned char *p = memory;
	for (size_t i = 0; i < n; i++)
		if (p[i] != (value & 0xff))
			return 0;
	return 1;
}
