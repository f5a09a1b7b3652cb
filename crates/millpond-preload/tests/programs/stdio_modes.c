/* Streams: their initial offset, and the operations that each mode string allows. Prints the results. */
#define _GNU_SOURCE
#include <stdio_ext.h>
#include <sys/stat.h>

#include "check.h"

static void put(const char *name, const char *text)
{
	int fd = open(name, O_CREAT | O_TRUNC | O_WRONLY, 0644);
	CHECK(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text) && close(fd) == 0);
}

static void show(const char *name)
{
	char text[200] = "";
	int fd = open(name, O_RDONLY);
	CHECK(fd >= 0 && read(fd, text, sizeof text - 1) >= 0 && close(fd) == 0);
	printf("  %s: %s\n", name, text);
}

static const char *modes[] = {
	"r", "rb", "r+", "rb+", "r+b", "re", "re+", "r+e", "rce+", "rm", "rm+", "w", "w+", "w+x", "wx+", "wxb+", "wb+x",
	"we+", "wbe+", "wce+", "a", "ab", "a+", "ab+", "a+b", "ae", "a+e", "ae+", "abe+", "ax", "rw", "wr", "r+w", "x", "",
	"rbtU", "rF+", "rbbbb+", "rbbbbb+", "rbbbbbb+", "w,x", "r,ccs=UTF-8", "w,ccs=UTF-8",
};
enum { MODES = sizeof modes / sizeof *modes };

static void use(FILE *f, const char *what, const char *mode)
{
	if (!f) {
		printf("%s %s: %s\n", what, mode, strerror(errno));
		return;
	}
	long begins = ftell(f);
	errno = 0;
	int put_result = fputs("XY", f), put_error = errno;
	long after = ftell(f);
	int flush_result = fflush(f);
	clearerr(f);
	rewind(f);
	errno = 0;
	int first = fgetc(f), get_error = errno;
	printf("%s %s: at %ld; write %d %s, at %ld, flush %d; read %d %s; %d %d %d; at %ld\n", what, mode, begins,
	       put_result < 0, put_result < 0 ? strerror(put_error) : "", after, flush_result, first,
	       first < 0 ? strerror(get_error) : "", __freadable(f) != 0, __fwritable(f) != 0, fcntl(fileno(f), F_GETFD),
	       ftell(f));
}

static void all_modes(void)
{
	for (int i = 0; i < MODES; i++) {
		char name[32];
		snprintf(name, sizeof name, "mode%d", i);
		unlink(name);
		if (!strchr(modes[i], 'x'))
			put(name, "0123456789");
		errno = 0;
		FILE *f = fopen(name, modes[i]);
		use(f, "fopen", modes[i]);
		if (f) {
			CHECK(fclose(f) == 0);
			show(name);
		}
	}
}

static void all_modes_of_numbers(void)
{
	static const int flags[] = {O_RDONLY, O_WRONLY, O_RDWR, O_RDWR | O_APPEND, O_WRONLY | O_APPEND};
	for (int i = 0; i < MODES; i++)
		for (int j = 0; j < 5; j++) {
			char what[32];
			snprintf(what, sizeof what, "fdopen of %x,", flags[j]);
			put("number", "0123456789");
			int fd = open("number", flags[j]);
			CHECK(fd >= 0);
			errno = 0;
			FILE *f = fdopen(fd, modes[i]);
			use(f, what, modes[i]);
			if (!f) {
				CHECK(close(fd) == 0);
				continue;
			}
			printf("  appends: %d\n", (fcntl(fileno(f), F_GETFL) & O_APPEND) != 0);
			CHECK(fclose(f) == 0);
			show("number");
		}
}

static void reopened(void)
{
	for (int i = 0; i < MODES; i++) {
		/* Streams of the library do not convert characters. */
		if (strstr(modes[i], ",ccs="))
			continue;
		put("first", "first");
		put("second", "second");
		if (strchr(modes[i], 'x'))
			unlink("second");
		FILE *f = fopen("first", "r");
		CHECK(f && fgetc(f) == 'f');
		errno = 0;
		f = freopen("second", modes[i], f);
		use(f, "freopen", modes[i]);
		if (f) {
			CHECK(fclose(f) == 0);
			show("second");
		}
	}
}

static void headers(void)
{
	for (int i = 0; i < 3; i++) {
		FILE *f = fopen("table", "a");
		CHECK(f);
		if (ftell(f) == 0)
			fputs("header;", f);
		fprintf(f, "%d;", i);
		printf("table: at %ld, %ld\n", ftell(f), lseek(fileno(f), 0, SEEK_CUR));
		CHECK(fclose(f) == 0);
	}
	show("table");
}

int main(void)
{
	headers();
	all_modes();
	all_modes_of_numbers();
	reopened();
	return 0;
}
