/* Reads a file until it is cached. Then it reports memory pressure to the library, by the file `arguments[1]`, until
   the cache takes less than half of its former memory, and reads the same bytes. */
#include "check.h"

static long resident(void)
{
	long pages = 0;
	FILE *file = fopen("/proc/self/statm", "r");
	CHECK(file && fscanf(file, "%*d %ld", &pages) == 1 && fclose(file) == 0);
	return pages;
}

static void read_all(int fd)
{
	char page[PAGE];
	for (int i = 0; i < 32 * PAGES; i++)
		CHECK(pread(fd, page, PAGE, (off_t)i * PAGE) == PAGE && is_all(page, PAGE, i % 251));
}

static void stall(const char *path, long total)
{
	char text[100];
	int fd = open(path, O_WRONLY | O_CREAT, 0644);
	int n = snprintf(text, sizeof text, "some avg10=0.00 avg60=0.00 avg300=0.00 total=%012ld\n", total);
	CHECK(fd >= 0 && write(fd, text, n) == n && close(fd) == 0);
}

int main(int count, char **arguments)
{
	char page[PAGE];
	stall(arguments[1], 0);
	int fd = open("f", O_RDWR | O_CREAT | O_TRUNC, 0644);
	for (int i = 0; i < 32 * PAGES; i++) {
		memset(page, i % 251, PAGE);
		CHECK(write(fd, page, PAGE) == PAGE);
	}
	for (int i = 0; i < 8; i++)
		read_all(fd);
	/* Before its first write the file takes no memory of the library. */
	memset(page, 0, PAGE);
	CHECK(pwrite(fd, page, PAGE, 0) == PAGE);
	for (int i = 0; i < 2; i++)
		read_all(fd);
	long before = resident();
	if (before < 20 * PAGES)
		return 3;
	/* The time limit of the test's runner ends this loop. */
	for (long total = 0; resident() > before / 2;) {
		stall(arguments[1], total += 1000000);
		usleep(100000);
	}
	read_all(fd);
	return close(fd);
}
