/* Calls with bad addresses, and with structures that the kernel refuses. Prints each result. */
#define _GNU_SOURCE
#include <linux/fs.h>
#include <linux/fiemap.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <sys/xattr.h>

#include "check.h"

#define SHOW(call) \
	do { \
		errno = 0; \
		long result = (long)(call); \
		printf("%s, %s: %ld %s\n", which, #call, result, result < 0 ? strerror(errno) : ""); \
	} while (0)

static const char *which;
static char page[PAGE];

/* The memory at `bad` can't be read. */
static void try_all(int fd, int out, void *bad)
{
	struct iovec vector = {bad, 100}, vectors[2] = {{page, 10}, {bad, 10}};
	SHOW(read(fd, bad, 100));
	SHOW(pread(fd, bad, 100, 0));
	SHOW(write(fd, bad, 100));
	SHOW(pwrite(fd, bad, 100, 0));
	SHOW(readv(fd, bad, 2));
	SHOW(writev(fd, bad, 2));
	SHOW(preadv(fd, &vector, 1, 0));
	SHOW(pwritev(fd, &vector, 1, 0));
	SHOW(preadv(fd, vectors, 2, 0));
	SHOW(pwritev(fd, vectors, 2, 0));
	SHOW(preadv2(fd, bad, 1, 0, 0));
	SHOW(pwritev2(fd, bad, 1, 0, 0));
	SHOW(readv(fd, vectors, -1));
	SHOW(preadv(fd, vectors, 1025, 0));
	SHOW(open(bad, O_RDONLY));
	SHOW(openat(AT_FDCWD, bad, O_RDWR | O_CREAT, 0600));
	SHOW(syscall(SYS_openat2, AT_FDCWD, "used", bad, 24));
	SHOW(syscall(SYS_openat2, AT_FDCWD, bad, page, 24));
	SHOW(creat(bad, 0600));
	SHOW(truncate(bad, 5));
	SHOW(fcntl(fd, F_SETLK, bad));
	SHOW(fcntl(fd, F_SETLKW, bad));
	SHOW(fcntl(fd, F_GETLK, bad));
	SHOW(fcntl(fd, F_OFD_SETLK, bad));
	SHOW(fcntl(fd, F_OFD_GETLK, bad));
	SHOW(fcntl(fd, F_SETOWN_EX, bad));
	SHOW(ioctl(fd, FICLONERANGE, bad));
	SHOW(ioctl(out, FICLONERANGE, bad));
	SHOW(ioctl(fd, FIONREAD, bad));
	SHOW(ioctl(fd, FIGETBSZ, bad));
	SHOW(ioctl(fd, FIONBIO, bad));
	SHOW(ioctl(fd, FS_IOC_FIEMAP, bad));
	SHOW(copy_file_range(fd, bad, out, NULL, 10, 0));
	SHOW(copy_file_range(fd, NULL, out, bad, 10, 0));
	SHOW(sendfile(out, fd, bad, 10));
	SHOW(splice(fd, bad, out, NULL, 10, 0));
	SHOW(syscall(SYS_fstat, fd, bad));
	SHOW(syscall(SYS_newfstatat, AT_FDCWD, bad, page, 0));
	SHOW(syscall(SYS_newfstatat, AT_FDCWD, "used", bad, 0));
	SHOW(syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_ALL, bad));
	SHOW(syscall(SYS_statx, AT_FDCWD, bad, 0, STATX_ALL, page));
	SHOW(utimensat(AT_FDCWD, bad, NULL, 0));
	SHOW(utimensat(AT_FDCWD, "used", bad, 0));
	SHOW(syscall(SYS_utimensat, fd, NULL, bad, 0));
	SHOW(chmod(bad, 0600));
	SHOW(fchmodat(AT_FDCWD, bad, 0600, 0));
	SHOW(chown(bad, -1, -1));
	SHOW(rename(bad, "x"));
	SHOW(rename("used", bad));
	SHOW(link(bad, "x"));
	SHOW(syscall(SYS_unlink, bad));
	SHOW(setxattr(bad, "user.x", "y", 1, 0));
	SHOW(fsetxattr(fd, bad, "y", 1, 0));
	SHOW(fsetxattr(fd, "user.x", bad, 1, 0));
	SHOW(syscall(SYS_execve, bad, NULL, NULL));
	SHOW(syscall(SYS_execve, "/bin/true", bad, NULL));
	SHOW(syscall(SYS_io_setup, 5, bad));
	SHOW(syscall(SYS_io_submit, 5, 1, bad));
	SHOW(syscall(SYS_io_submit, 0, 1, bad));
	SHOW(syscall(SYS_io_cancel, 5, bad, bad));
	SHOW(syscall(SYS_open_by_handle_at, fd, bad, O_RDONLY));
	unsigned long context = 0;
	CHECK(syscall(SYS_io_setup, 5, &context) == 0);
	SHOW(syscall(SYS_io_submit, context, 1, bad));
	SHOW(syscall(SYS_io_submit, context, 1, &bad));
	SHOW(syscall(SYS_io_submit, context, -1, bad));
	struct timespec now = {0, 0};
	SHOW(syscall(SYS_io_getevents, context, 0, 1, bad, &now));
	SHOW(syscall(SYS_io_destroy, context));
}

static void try_messages(int fd, void *bad)
{
	int pair[2];
	union {
		struct cmsghdr head;
		char bytes[4 * PAGE];
	} control = {0};
	struct iovec one = {"x", 1};
	struct msghdr message = {.msg_iov = &one, .msg_iovlen = 1, .msg_control = &control};
	struct mmsghdr several[2] = {{message}, {message}};
	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
	SHOW(sendmsg(pair[0], bad, 0));
	SHOW(sendmmsg(pair[0], bad, 1, 0));
	SHOW(syscall(SYS_sendmsg, pair[0], bad, 0));
	static const size_t lens[] = {0, 1, 15, 16, 17, 19, 20, 24, 28, 64, 65, 100000, -1, (size_t)1 << 63};
	control.head.cmsg_level = SOL_SOCKET;
	control.head.cmsg_type = SCM_RIGHTS;
	for (int i = 0; i < 300; i++)
		((int *)CMSG_DATA(&control.head))[i] = fd;
	for (unsigned i = 0; i < sizeof lens / sizeof *lens; i++)
		for (size_t room = 0; room <= 64; room += room < 32 ? 8 : 32) {
			control.head.cmsg_len = lens[i];
			message.msg_controllen = room;
			several[0].msg_hdr = several[1].msg_hdr = message;
			printf("cmsg_len %zu, msg_controllen %zu: ", lens[i], room);
			SHOW(sendmsg(pair[0], &message, MSG_DONTWAIT));
			SHOW(sendmmsg(pair[0], several, 2, MSG_DONTWAIT));
		}
	control.head.cmsg_len = CMSG_LEN(300 * sizeof(int));
	message.msg_controllen = sizeof control;
	SHOW(sendmsg(pair[0], &message, MSG_DONTWAIT));
	message.msg_control = bad;
	SHOW(sendmsg(pair[0], &message, MSG_DONTWAIT));
	message.msg_controllen = (size_t)1 << 40;
	SHOW(sendmsg(pair[0], &message, MSG_DONTWAIT));
	/* The second header is on the page that can't be read. */
	control.head.cmsg_len = 32;
	memcpy((char *)bad - 32, &control, 32);
	message.msg_control = (char *)bad - 32;
	message.msg_controllen = 64;
	SHOW(sendmsg(pair[0], &message, MSG_DONTWAIT));
	message.msg_iov = bad;
	SHOW(sendmsg(pair[0], &message, MSG_DONTWAIT));
	several[1].msg_hdr = message;
	SHOW(sendmmsg(pair[0], several, 2, MSG_DONTWAIT));
	CHECK(close(pair[0]) == 0 && close(pair[1]) == 0);
}

int main(void)
{
	char *edge = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(edge != MAP_FAILED && mprotect(edge + PAGE, PAGE, PROT_NONE) == 0);
	int null = open("/dev/null", O_RDWR);
	which = "messages, before any file";
	try_messages(null, edge + PAGE);
	make_pages("used", 0);
	make_pages("out", 0);
	void *bad[] = {edge + PAGE, (void *)8, (void *)-8};
	for (int i = 0; i < 3; i++) {
		int fd = open("used", O_RDWR | O_CLOEXEC), out = open("out", O_RDWR | O_CLOEXEC);
		CHECK(fd >= 0 && out >= 0);
		which = "new";
		try_all(fd, out, bad[i]);
		for (int j = 0; j < 600; j++)
			CHECK(pread(fd, page, PAGE, j % 8 * PAGE) == PAGE && pread(out, page, PAGE, j % 8 * PAGE) == PAGE);
		which = "used";
		try_all(fd, out, bad[i]);
		CHECK(close(fd) == 0 && close(out) == 0);
	}
	which = "messages";
	int fd = open("used", O_RDWR | O_CLOEXEC);
	for (int j = 0; j < 600; j++)
		CHECK(pread(fd, page, PAGE, j % 8 * PAGE) == PAGE);
	try_messages(fd, edge + PAGE);
	CHECK(fflush(stdout) == 0);
	return 0;
}
