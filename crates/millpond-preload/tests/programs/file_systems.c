/* Reads of files on file systems whose mappings differ from their reads. One scenario each, by name. Prints nothing
   and returns 0 if all results are the kernel's. */
#define _GNU_SOURCE
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>

#include "check.h"

enum { ROUNDS = 60, COPIED = 8 };

static void check_page(int fd, int index, int value)
{
	char page[PAGE];
	CHECK(pread(fd, page, PAGE, (off_t)index * PAGE) == PAGE && is_all(page, PAGE, value));
}

static void check_pages(int fd, int value)
{
	for (int i = 0; i < ROUNDS * COPIED; i++)
		check_page(fd, i % COPIED, value);
}

static void write_pages(int fd, int value)
{
	char page[PAGE];
	memset(page, value, PAGE);
	for (int i = 0; i < COPIED; i++)
		CHECK(pwrite(fd, page, PAGE, (off_t)i * PAGE) == PAGE);
}

/* ---- copied up: `file` is in the lower layer of an overlay, all 'l' ---- */

static void copied_up(int by_other, int is_used_before)
{
	int reader = open("file", O_RDONLY | O_CLOEXEC);
	CHECK(reader >= 0);
	if (is_used_before)
		check_pages(reader, 'l');
	for (int value = 'u'; value <= 'w'; value++) {
		if (by_other) {
			char command[100];
			/* Past the library. */
			snprintf(command, sizeof command,
				 "head -c %d /dev/zero | tr '\\0' %c | env -u LD_PRELOAD dd of=file conv=notrunc status=none",
				 COPIED * PAGE, value);
			CHECK(system(command) == 0);
		} else {
			int writer = open("file", O_RDWR);
			CHECK(writer >= 0);
			write_pages(writer, value);
			check_pages(writer, value);
			CHECK(close(writer) == 0);
		}
		check_pages(reader, value);
		int other = open("file", O_RDONLY);
		CHECK(other >= 0);
		check_pages(other, value);
		CHECK(close(other) == 0);
		check_pages(reader, value);
	}
	CHECK(close(reader) == 0);
}

/* ---- holes: reads of a sparse file take no space ---- */

static void holes(int flags)
{
	enum { SPARSE = 6000 };
	struct statvfs before, after;
	int fd = open("sparse", O_RDWR | O_CREAT, 0644);
	CHECK(fd >= 0 && ftruncate(fd, SPARSE * (off_t)PAGE) == 0);
	CHECK(pwrite(fd, "end", 3, SPARSE * (off_t)PAGE - 3) == 3 && close(fd) == 0);
	CHECK((fd = open("sparse", flags)) >= 0);
	CHECK(fstatvfs(fd, &before) == 0);
	for (int i = 0; i < 2 * SPARSE; i++)
		check_page(fd, i % (SPARSE - 1), 0);
	for (int i = 0; i < 1000; i++)
		check_page(fd, 5, 0);
	CHECK(fstatvfs(fd, &after) == 0);
	/* The file system itself may use a page or two. */
	CHECK(before.f_bfree - after.f_bfree < 8);
	CHECK(close(fd) == 0);
}

int main(int count, char **arguments)
{
	const char *name = count > 1 ? arguments[1] : "";
	if (!strcmp(name, "copied_up"))
		copied_up(!strcmp(arguments[2], "other"), !strcmp(arguments[3], "used"));
	else if (!strcmp(name, "holes"))
		holes(atoi(arguments[2]) ? O_RDWR : O_RDONLY);
	else
		return 2;
	return 0;
}
