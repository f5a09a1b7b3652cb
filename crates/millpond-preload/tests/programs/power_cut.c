/* Writes 1 MiB to "file" in the way of the first argument, writes a page behind it, syncs, and reports that. Then it
   waits for its input: a close would write and sync in other ways. */
#define _GNU_SOURCE
#include "check.h"
#include <sys/sendfile.h>
#include <sys/wait.h>

enum { A_BYTES = 1 << 20, B_BYTES = 4096 };

int main(int argc, char **argv)
{
	const char *how = argv[1], *sync = argv[2], *from_path = argv[3];
	char page[B_BYTES], line[8];
	int file = open("file", O_RDWR), source = open(from_path, O_RDONLY);
	CHECK(file >= 0 && source >= 0);
	/* The file is served and has no dirty page. The write-back of a dirty page would make the library sync by
	 * itself. */
	CHECK(pread(file, page, B_BYTES, A_BYTES) == B_BYTES);
	if (!strcmp(how, "copy_file_range")) {
		loff_t from = 0, to = 0;
		while (to < A_BYTES)
			CHECK(copy_file_range(source, &from, file, &to, A_BYTES - to, 0) > 0);
	} else if (!strcmp(how, "sendfile")) {
		off_t from = 0;
		while (from < A_BYTES)
			CHECK(sendfile(file, source, &from, A_BYTES - from) > 0);
	} else if (!strcmp(how, "reopen")) {
		static char all[A_BYTES];
		CHECK(read(source, all, A_BYTES) == A_BYTES && pwrite(file, all, A_BYTES, 0) == A_BYTES);
		CHECK(close(file) == 0 && (file = open("file", O_RDWR)) >= 0);
		CHECK(pread(file, page, B_BYTES, A_BYTES) == B_BYTES);
	} else if (!strcmp(how, "process")) {
		char from[4096];
		int status, child;
		CHECK(snprintf(from, sizeof from, "if=%s", from_path) < (int)sizeof from);
		child = fork();
		if (child == 0) {
			execlp("dd", "dd", from, "of=file", "bs=64k", "conv=notrunc", "status=none", NULL);
			_exit(127);
		}
		CHECK(waitpid(child, &status, 0) == child && status == 0);
	} else
		CHECK(!"a way that is known");
	memset(page, 0xB, B_BYTES);
	CHECK(pwrite(file, page, B_BYTES, A_BYTES) == B_BYTES);
	CHECK((strcmp(sync, "fsync") ? fdatasync(file) : fsync(file)) == 0);
	CHECK(write(1, "synced\n", 7) == 7);
	return read(0, line, 1) < 0;
}
