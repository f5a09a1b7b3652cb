/*
 * One surrounding of a program for each name; usage: surroundings NAME. Each uses a file, before and after, and
 * prints the outcome. The test compares the outcome with that on the kernel alone.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 16 };

static const char *path = "file";
static char page[PAGE], other[PAGE];

static void say(const char *text)
{
	if (write(1, text, strlen(text)) < 0)
		_exit(9);
}

/* Makes the file; page i is all `a + i`. */
static void make(const char *name)
{
	int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0644);
	for (int i = 0; i < PAGES; i++) {
		memset(page, 'a' + i, PAGE);
		pwrite(fd, page, PAGE, i * PAGE);
	}
	close(fd);
}

/* Reads each page often enough for the file to be served; returns whether all bytes were right. */
static int use(int fd)
{
	int right = 1;
	for (int round = 0; round < 60; round++)
		for (int i = 0; i < PAGES; i++)
			right &= pread(fd, other, PAGE, i * PAGE) == PAGE && other[0] == 'a' + i && other[PAGE - 1] == 'a' + i;
	return right;
}

static int begin(int flags)
{
	make(path);
	int fd = open(path, flags);
	if (fd < 0 || !use(fd))
		say("the file is wrong before\n");
	return fd;
}

/* The file is unchanged, by this descriptor and by another. */
static void check_after(int fd)
{
	say(use(fd) ? "read\n" : "READ WRONG\n");
	int again = open(path, O_RDONLY);
	say(again >= 0 && use(again) ? "read again\n" : "READ AGAIN WRONG\n");
	close(again);
}

/* --- how the main thread ends --- */

static void *work_on(void *arg)
{
	int fd = open(path, O_RDWR);
	say(use(fd) && pwrite(fd, "A", 1, 0) == 1 ? "worker fine\n" : "worker WRONG\n");
	usleep(100000);
	say(pread(fd, other, 1, 0) == 1 && other[0] == 'A' ? "worker goes on\n" : "worker WRONG\n");
	return NULL;
}

static void end_main(int by_number)
{
	pthread_t thread;
	begin(O_RDONLY);
	pthread_create(&thread, NULL, work_on, NULL);
	pthread_detach(thread);
	if (by_number)
		syscall(SYS_exit, 0);
	pthread_exit(NULL);
}

static pthread_t main_thread;

static void *cancel_main(void *arg)
{
	pthread_cancel(main_thread);
	pthread_join(main_thread, NULL);
	return work_on(arg);
}

static void cancelled_main(void)
{
	pthread_t thread;
	begin(O_RDONLY);
	main_thread = pthread_self();
	pthread_create(&thread, NULL, cancel_main, NULL);
	for (;;)
		pause();
}

/* --- small stacks --- */

static char large[PAGE * 4];

static void use_on_small_stack(void)
{
	struct stat stat;
	struct iovec parts[2] = { { large, 100 }, { large + 200, 100 } };
	long sum = 0;
	int fd = open("small", O_RDWR | O_CREAT, 0644);
	for (int i = 0; i < PAGES; i++)
		pwrite(fd, page, PAGE, i * PAGE);
	for (int round = 0; round < 60; round++)
		for (int i = 0; i < PAGES; i++)
			sum += pread(fd, large, PAGE, i * PAGE);
	sum += preadv(fd, parts, 2, 50) + pwritev(fd, parts, 2, 60000);
	lseek(fd, 0, SEEK_SET);
	sum += read(fd, large, 3000) + write(fd, large, 100);
	ftruncate(fd, 30000);
	fstat(fd, &stat);
	sum += stat.st_size;
	fsync(fd);
	int copy = dup(fd);
	close(fd);
	rename("small", "renamed");
	sum += pread(copy, large, 10, 29995);
	close(copy);
	unlink("renamed");
	dprintf(1, "sum %ld\n", sum);
}

static void *run_small(void *arg)
{
	use_on_small_stack();
	return NULL;
}

static void stack_of_thread(size_t bytes)
{
	pthread_attr_t attributes;
	pthread_attr_init(&attributes);
	if (pthread_attr_setstacksize(&attributes, bytes))
		say("no such size\n");
	for (int i = 0; i < 3; i++) {
		pthread_t thread;
		if (pthread_create(&thread, &attributes, run_small, NULL))
			say("no thread\n");
		else
			pthread_join(thread, NULL);
	}
}

/* Memory of `bytes` above pages that may not be touched. */
static char *guarded(size_t bytes)
{
	char *memory = mmap(NULL, 65536 + bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	mprotect(memory, 65536, PROT_NONE);
	return memory + 65536;
}

static void on_signal(int signal)
{
	use_on_small_stack();
}

static void stack_of_handler(size_t bytes)
{
	stack_t stack = { .ss_sp = guarded(bytes), .ss_size = bytes };
	struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_ONSTACK };
	if (sigaltstack(&stack, NULL))
		say("no such size\n");
	sigaction(SIGUSR1, &action, NULL);
	for (int i = 0; i < 3; i++)
		raise(SIGUSR1);
}

static void on_timer(int signal)
{
	volatile char frame[1500];
	memset((void *)frame, 0xee, sizeof frame);
}

/* A handler on the signal stack, which other handlers on the same stack interrupt. */
static void on_signal_interrupted(int signal)
{
	volatile unsigned char frame[6000];
	struct timespec begun, now;
	int fd = open("nested", O_RDWR | O_CREAT, 0644);
	memset((void *)frame, 0x11, sizeof frame);
	clock_gettime(CLOCK_MONOTONIC, &begun);
	do {
		for (int i = 0; i < 100; i++) {
			pwrite(fd, page, PAGE, i % PAGES * PAGE);
			pread(fd, other, PAGE, i * 7 % PAGES * PAGE);
		}
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while (now.tv_sec - begun.tv_sec < 2);
	for (unsigned i = 0; i < sizeof frame; i++)
		if (frame[i] != 0x11) {
			say("the frame is OVERWRITTEN\n");
			break;
		}
	close(fd);
	say("handled\n");
}

static void nested_handlers(void)
{
	static const size_t bytes = 128 << 10;
	stack_t stack = { .ss_sp = guarded(bytes), .ss_size = bytes }, found;
	struct sigaction action = { .sa_handler = on_signal_interrupted, .sa_flags = SA_ONSTACK };
	struct sigaction timer = { .sa_handler = on_timer, .sa_flags = SA_ONSTACK | SA_RESTART };
	struct itimerval often = { { 0, 1000 }, { 0, 1000 } }, never = { { 0, 0 }, { 0, 0 } };
	sigaltstack(&stack, NULL);
	sigaction(SIGUSR1, &action, NULL);
	sigaction(SIGALRM, &timer, NULL);
	setitimer(ITIMER_REAL, &often, NULL);
	raise(SIGUSR1);
	setitimer(ITIMER_REAL, &never, NULL);
	sigaltstack(NULL, &found);
	say(found.ss_sp == stack.ss_sp && found.ss_size == bytes && !found.ss_flags ? "kept\n" : "LOST\n");
}

static ucontext_t main_context, fiber;

static void stack_of_fiber(size_t bytes)
{
	char *memory = guarded(bytes);
	for (int i = 0; i < 3; i++) {
		getcontext(&fiber);
		fiber.uc_stack.ss_sp = memory;
		fiber.uc_stack.ss_size = bytes;
		fiber.uc_link = &main_context;
		makecontext(&fiber, use_on_small_stack, 0);
		swapcontext(&main_context, &fiber);
	}
}

/* --- filters of system calls --- */

/* A system call by an instruction of its own, which no library sees. */
static long call_unseen(long number, long a, long b, long c)
{
#if defined(__x86_64__)
	long result;
	__asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
	return result;
#elif defined(__aarch64__)
	register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c;
	__asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
	return x0;
#endif
}

enum { ONE_THREAD, ALL_THREADS, ALL_UNSEEN };

static void forbid(unsigned action, int for_all)
{
	static const int permitted[] = { SYS_read, SYS_write, SYS_pread64, SYS_pwrite64, SYS_openat, SYS_close, SYS_exit,
		SYS_exit_group, SYS_rt_sigreturn, SYS_clock_nanosleep, SYS_clock_gettime, SYS_getrusage, SYS_lseek };
	int count = sizeof permitted / sizeof *permitted, next = 0;
	struct sock_filter filter[64];
	filter[next++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
	for (int i = 0; i < count; i++)
		filter[next++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, permitted[i], count - i, 0);
	filter[next++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, action);
	filter[next++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	struct sock_fprog program = { next, filter };
	prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	int failed = for_all == ALL_UNSEEN ?
			     call_unseen(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, (long)&program) :
		     for_all ? syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) :
			       prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
	if (failed)
		say("no filter\n");
}

static void in_filter(unsigned action, int for_all)
{
	int fd = begin(O_RDWR);
	struct timespec pause = { 1, 500000000 };
	struct rusage used;
	forbid(action, for_all);
	if (for_all == ALL_UNSEEN)
		goto sleep;
	check_after(fd);
	lseek(fd, 0, SEEK_SET);
	say(pwrite(fd, "a", 1, 0) == 1 && write(fd, page, 1) == 1 && read(fd, other, 1) == 1 ? "written\n" : "NOT WRITTEN\n");
sleep:
	clock_nanosleep(CLOCK_MONOTONIC, 0, &pause, NULL);
	getrusage(RUSAGE_SELF, &used);
	/* A thread whose call is refused must not retry in a busy loop. */
	say(used.ru_utime.tv_sec + used.ru_stime.tv_sec < 1 ? "quiet\n" : "BUSY\n");
	close(fd);
	syscall(SYS_exit_group, 0);
}

static void refused(int signal)
{
	static const char text[] = "a call was refused\n";
	syscall(SYS_write, 1, text, sizeof text - 1);
}

static void in_strict_mode(int by_number)
{
	int fd = begin(O_RDWR);
	if (by_number)
		syscall(SYS_prctl, PR_SET_SECCOMP, SECCOMP_MODE_STRICT, 0, 0, 0);
	else
		prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT);
	for (int i = 0; i < PAGES; i++)
		if (read(fd, other, PAGE) != PAGE || other[0] != 'a' + i)
			say("READ WRONG\n");
	say(write(fd, page, PAGE) == PAGE ? "written\n" : "NOT WRITTEN\n");
	syscall(SYS_exit, 0);
}

/* --- locked memory --- */

static long status(const char *key)
{
	char line[256];
	long value = -1;
	FILE *file = fopen("/proc/self/status", "r");
	while (fgets(line, sizeof line, file))
		if (!strncmp(line, key, strlen(key)))
			value = atol(line + strlen(key));
	fclose(file);
	return value;
}

static void lock_memory(int flags, int first)
{
	int fd = first ? -1 : begin(O_RDONLY);
	if (mlockall(flags)) {
		say("mlockall fails\n");
		return;
	}
	if (first)
		fd = begin(O_RDONLY);
	int sparse = open("sparse", O_RDWR | O_CREAT, 0644);
	ftruncate(sparse, 1L << 30);
	for (int i = 0; i < 3000; i++)
		pread(sparse, other, PAGE, (i % 4) * PAGE);
	check_after(fd);
	long resident_kib = status("VmRSS:");
	if (resident_kib < 40 << 10)
		say("below 40 MiB\n");
	else
		dprintf(1, "RESIDENT %ld KiB\n", resident_kib);
	unlink("sparse");
}

/* --- numbers of the library --- */

/* The library's numbers are high. It moves its copy of stderr if the program wants the number. */
static int is_not_ours(int number)
{
	struct stat of_number, of_stderr;
	return number >= 1000 && !fstat(number, &of_number) && !fstat(2, &of_stderr) &&
	       (of_number.st_dev != of_stderr.st_dev || of_number.st_ino != of_stderr.st_ino);
}

static void take_number_of_library(void)
{
	int fd = begin(O_RDWR), tried = 0;
	DIR *numbers = opendir("/proc/self/fd");
	for (struct dirent *entry; (entry = readdir(numbers));) {
		int number = atoi(entry->d_name);
		if (!is_not_ours(number))
			continue;
		tried++;
		errno = 0;
		if (dup2(fd, number) != -1 || errno != EBUSY || dup3(fd, number, O_CLOEXEC) != -1 || errno != EBUSY)
			say("TAKEN\n");
		if (!is_not_ours(number))
			say("CHANGED\n");
	}
	closedir(numbers);
	say(tried ? "refused\n" : "none\n");
	check_after(fd);
}

/* --- namespaces --- */

static void enter_namespace(int kind, int flags)
{
	int own = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
	int fd = begin(O_RDONLY);
	int failed = kind == 0 ? unshare(flags) : kind == 1 ? setns(own, flags) : syscall(SYS_unshare, flags);
	dprintf(1, "%s\n", failed ? strerror(errno) : "entered");
	check_after(fd);
}

/* --- vfork --- */

static volatile int told;

static void child_of_vfork(void)
{
	int fd = begin(O_RDWR);
	lseek(fd, 2 * PAGE, SEEK_SET);
	static const char *const programs[] = { "./missing", "/tmp", "/bin/true" };
	for (int i = 0; i < 3; i++) {
		char *const arguments[] = { (char *)programs[i], NULL };
		told = 0;
		pid_t child = vfork();
		if (child == 0) {
			execve(programs[i], arguments, environ);
			told = errno;
			_exit(127);
		}
		int how;
		waitpid(child, &how, 0);
		dprintf(1, "%s: %s, status %d\n", programs[i], told ? strerror(told) : "started", WEXITSTATUS(how));
	}
	/* The parent waits; and the child may use the parent's descriptors. */
	pid_t child = vfork();
	if (child == 0) {
		usleep(50000);
		told = read(fd, other, 1) == 1 ? other[0] : -1;
		dup2(1, 3);
		close(fd);
		_exit(0);
	}
	dprintf(1, "child read %c\n", told);
	waitpid(child, NULL, 0);
	dprintf(1, "parent is at %ld\n", (long)lseek(fd, 0, SEEK_CUR));
	check_after(fd);
	pwrite(fd, "z", 1, 0);
	pread(fd, other, 1, 0);
	dprintf(1, "and has written %c\n", other[0]);
	/* A program inherits the file as its standard output. */
	child = vfork();
	if (child == 0) {
		char *const arguments[] = { "echo", "text", NULL };
		dup2(fd, 1);
		execvp("echo", arguments);
		_exit(127);
	}
	waitpid(child, NULL, 0);
	pread(fd, other, 5, 2 * PAGE + 1);
	dprintf(1, "it wrote %.4s at %ld\n", other, (long)lseek(fd, 0, SEEK_CUR));
}

static void *work_beside(void *arg)
{
	for (int i = 0; !*(volatile int *)arg; i++) {
		int fd = open("beside", O_RDWR | O_CREAT, 0644);
		char byte = 'A' + i % 26, found = 0;
		for (int round = 0; round < 200; round++)
			if (pwrite(fd, &byte, 1, 0) != 1 || pread(fd, &found, 1, 0) != 1 || found != byte)
				say("WRONG BESIDE\n");
		close(fd);
	}
	return NULL;
}

static void vfork_beside_threads(void)
{
	int is_over = 0;
	pthread_t threads[2];
	int fd = begin(O_RDWR);
	pthread_create(&threads[0], NULL, work_beside, &is_over);
	for (int i = 0; i < 100; i++) {
		pid_t child = vfork();
		if (child == 0) {
			told = i;
			if (i % 2)
				_exit(0);
			execlp("true", "true", NULL);
			_exit(127);
		}
		int how;
		if (waitpid(child, &how, 0) != child || how != 0 || told != i)
			say("CHILD WRONG\n");
		if (i % 10 == 0 && !use(fd))
			say("READ WRONG\n");
	}
	is_over = 1;
	pthread_join(threads[0], NULL);
	say("done\n");
}

/* --- signals that a program waits for --- */

static sigset_t awaited;
static int awaited_signal, rounds = 40;
static volatile int got, valued;

static void *wait_for_signals(void *arg)
{
	for (int i = 0; i < rounds; i++) {
		siginfo_t info;
		struct timespec limit = { 5, 0 };
		if (sigtimedwait(&awaited, &info, &limit) != awaited_signal)
			break;
		valued += info.si_code == SI_QUEUE && info.si_value.sival_int == 1000 + i;
		got++;
	}
	return NULL;
}

static void wait_for(int signal, const char *how)
{
	pthread_t thread;
	awaited_signal = signal;
	sigemptyset(&awaited);
	sigaddset(&awaited, signal);
	pthread_sigmask(SIG_BLOCK, &awaited, NULL);
	begin(O_RDWR);
	int fd = signalfd(-1, &awaited, SFD_NONBLOCK);
	if (!strcmp(how, "sigwait"))
		pthread_create(&thread, NULL, wait_for_signals, NULL);
	for (int i = 0; i < rounds; i++) {
		union sigval value = { .sival_int = 1000 + i };
		sigqueue(getpid(), signal, value);
		if (!strcmp(how, "sigwait")) {
			for (int wait = 0; wait < 5000 && got == i; wait++)
				usleep(1000);
		} else if (!strcmp(how, "signalfd")) {
			struct signalfd_siginfo info;
			struct pollfd polled = { fd, POLLIN };
			poll(&polled, 1, 5000);
			if (read(fd, &info, sizeof info) == sizeof info) {
				got++;
				valued += info.ssi_int == 1000 + i;
			}
		} else {
			siginfo_t info;
			struct timespec now = { 0, 0 };
			usleep(2000);
			if (sigtimedwait(&awaited, &info, &now) == signal) {
				got++;
				valued += info.si_code == SI_QUEUE && info.si_value.sival_int == 1000 + i;
			}
		}
	}
	if (!strcmp(how, "sigwait"))
		pthread_join(thread, NULL);
	dprintf(1, "sent %d, got %d, %d of them with their value\n", rounds, got, valued);
}

/* --- a program's view of its descriptors and of itself --- */

static void own_flags(void)
{
	const int f_getsig = 11, f_getown_ex = 16;
	int owner[2] = { -1, -1 };
	int fd = begin(O_RDWR);
	dprintf(1, "F_GETFL %o", fcntl(fd, F_GETFL));
	dprintf(1, " F_GETLEASE %d F_GETOWN %d F_GETSIG %d", fcntl(fd, F_GETLEASE), fcntl(fd, F_GETOWN), fcntl(fd, f_getsig));
	int failed = fcntl(fd, f_getown_ex, owner);
	dprintf(1, " F_GETOWN_EX %d %d %d\n", failed, owner[0], owner[1]);
	int lock = open(path, O_RDONLY);
	dprintf(1, "F_GETFL %o\n", fcntl(fd, F_GETFL));
	check_after(fd);
	close(lock);
}

static volatile sig_atomic_t broken_fd;

static void on_break(int signal, siginfo_t *info, void *context)
{
	broken_fd = info->si_fd;
	fcntl(info->si_fd, F_SETLEASE, F_UNLCK);
}

static void own_lease(void)
{
	struct sigaction action = { .sa_sigaction = on_break, .sa_flags = SA_SIGINFO };
	int fd = begin(O_RDONLY);
	sigaction(SIGRTMIN + 1, &action, NULL);
	fcntl(fd, 10 /* F_SETSIG */, SIGRTMIN + 1);
	int failed = fcntl(fd, F_SETLEASE, F_RDLCK);
	dprintf(1, "lease %s, is %d\n", failed ? strerror(errno) : "taken", fcntl(fd, F_GETLEASE));
	check_after(fd);
	pid_t child = fork();
	if (child == 0) {
		int writer = open(path, O_WRONLY);
		_exit(writer < 0);
	}
	int how;
	while (waitpid(child, &how, 0) < 0 && errno == EINTR)
		;
	dprintf(1, "broken %s, opened %d\n", broken_fd == fd ? "here" : "elsewhere", how);
	check_after(fd);
}

static void high_numbers(void)
{
	struct rlimit limit = { 0, 0 };
	getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = limit.rlim_max;
	setrlimit(RLIMIT_NOFILE, &limit);
	int fd = begin(O_RDWR);
	static const int numbers[] = { 1000, 65535, 65536, 70000, 200000 };
	for (int i = 0; i < 5; i++) {
		if ((rlim_t)numbers[i] >= limit.rlim_max)
			continue;
		int copy = dup2(fd, numbers[i]);
		int fresh = fcntl(open(path, O_RDWR), F_DUPFD, numbers[i] + 1);
		char byte = '0' + i, found = 0;
		int right = use(copy) && use(fresh) && pwrite(copy, &byte, 1, 10) == 1 && pread(fresh, &found, 1, 10) == 1 &&
			    found == byte && pread(fd, &found, 1, 10) == 1 && found == byte;
		dprintf(1, "%s\n", right ? "right" : "WRONG");
		close(copy);
		close(fresh);
	}
	check_after(fd);
}

static void threads_of_process(void)
{
	begin(O_RDONLY);
	dprintf(1, "threads %ld\n", status("Threads:"));
}

static void own_fdinfo(void)
{
	char name[64], line[64];
	int fd = begin(O_RDONLY);
	for (int i = 0; i < 5; i++)
		read(fd, other, 100);
	snprintf(name, sizeof name, "/proc/self/fdinfo/%d", fd);
	FILE *info = fopen(name, "r");
	dprintf(1, "%s", info && fgets(line, sizeof line, info) ? line : "nothing\n");
}

static void by_own_name(void)
{
	char name[64], target[PATH_MAX];
	int fd = begin(O_RDWR);
	pwrite(fd, "b", 1, 0);
	snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
	int again = open(name, O_RDONLY);
	dprintf(1, "%d %c", again >= 0 && pread(again, other, 1, 0) == 1, other[0]);
	ssize_t bytes = readlink(name, target, sizeof target);
	dprintf(1, " %s\n", bytes > 5 && !memcmp(target + bytes - 5, "/file", 5) ? "file" : "SOMETHING ELSE");
	struct stat one, two;
	dprintf(1, "%s\n", !stat(name, &one) && !fstat(fd, &two) && one.st_ino == two.st_ino ? "same" : "ANOTHER");
}

static void plain(void)
{
	int fd = begin(O_RDWR);
	free(malloc(100000));
	check_after(fd);
}

int main(int count, char **arguments)
{
	const char *name = arguments[1];
	struct sigaction trap = { .sa_handler = refused };
#define CASE(text, call) \
	if (!strcmp(name, text)) { \
		call; \
		return 0; \
	}
	CASE("plain", plain())
	CASE("main-pthread-exit", end_main(0))
	CASE("main-sys-exit", end_main(1))
	CASE("main-cancelled", cancelled_main())
	CASE("stack-thread-min", stack_of_thread(16384))
	CASE("stack-handler-min", stack_of_handler(8192))
	CASE("stack-fiber", stack_of_fiber(8192))
	CASE("stack-handlers-nested", nested_handlers())
	CASE("seccomp-strict", in_strict_mode(0))
	CASE("seccomp-strict-by-number", in_strict_mode(1))
	CASE("seccomp-kill", in_filter(SECCOMP_RET_KILL_PROCESS, 1))
	CASE("seccomp-kill-one-thread", in_filter(SECCOMP_RET_KILL_PROCESS, 0))
	CASE("seccomp-errno", in_filter(SECCOMP_RET_ERRNO | EPERM, 1))
	CASE("seccomp-errno-unseen", in_filter(SECCOMP_RET_ERRNO | EPERM, ALL_UNSEEN))
	CASE("seccomp-trap", (sigaction(SIGSYS, &trap, NULL), in_filter(SECCOMP_RET_TRAP, 1)))
	CASE("mlockall-current", lock_memory(MCL_CURRENT, 0))
	CASE("mlockall-future", lock_memory(MCL_FUTURE, 1))
	CASE("mlockall-both", lock_memory(MCL_CURRENT | MCL_FUTURE, 0))
	CASE("library-number", take_number_of_library())
	CASE("namespace-user", enter_namespace(0, CLONE_NEWUSER))
	CASE("namespace-user-by-number", enter_namespace(2, CLONE_NEWUSER))
	CASE("namespace-mount", enter_namespace(0, CLONE_NEWNS))
	CASE("namespace-setns", enter_namespace(1, CLONE_NEWNS))
	CASE("vfork", child_of_vfork())
	CASE("vfork-beside-threads", vfork_beside_threads())
	CASE("sigio-sigwait", wait_for(SIGIO, "sigwait"))
	CASE("sigio-signalfd", wait_for(SIGIO, "signalfd"))
	CASE("sigio-pending", wait_for(SIGIO, "pending"))
	CASE("realtime-sigwait", wait_for(61, "sigwait"))
	CASE("realtime-signalfd", wait_for(61, "signalfd"))
	CASE("realtime-pending", wait_for(61, "pending"))
	CASE("flags", own_flags())
	CASE("lease", own_lease())
	CASE("high-numbers", high_numbers())
	CASE("threads", threads_of_process())
	CASE("fdinfo", own_fdinfo())
	CASE("own-name", by_own_name())
	return 8;
}
