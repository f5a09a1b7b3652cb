/* Many signals to a thread that reads and writes a file. Handlers run with all the data of their signal, and no
   signal is lost. They use the file themselves, and jump away. The program also runs on the kernel alone. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(c) do { if (!(c)) { fprintf(stderr, "line %d: %s, errno %d\n", __LINE__, #c, errno); abort(); } } while (0)
enum { PAGE = 4096, PAGES = 64 };
static int file;
static char block[PAGE];

static void fill(char *page, int at) { memset(page, 'a' + at % 26, PAGE); }

static void make(const char *name)
{
	file = open(name, O_RDWR | O_CREAT | O_TRUNC, 0644);
	CHECK(file >= 0);
	for (int at = 0; at < PAGES; at++) {
		fill(block, at);
		CHECK(pwrite(file, block, PAGE, (off_t)at * PAGE) == PAGE);
	}
}

/* Overwrites a page with its number, and reads another; neither may be torn. */
static void work(int step)
{
	char page[PAGE];
	int at = step % PAGES, other = (step * 7) % PAGES;
	fill(page, at);
	CHECK(pwrite(file, page, PAGE, (off_t)at * PAGE) == PAGE);
	CHECK(pread(file, page, PAGE, (off_t)other * PAGE) == PAGE);
	CHECK(page[0] == 'a' + other % 26 && page[PAGE - 1] == page[0]);
}

static void same_mask(const sigset_t *mask)
{
	sigset_t now;
	CHECK(pthread_sigmask(SIG_SETMASK, NULL, &now) == 0);
	for (int s = 1; s < 65; s++)
		if (s != 32 && s != 33)
			CHECK(sigismember(&now, s) == sigismember(mask, s));
}

static pthread_t worker;
static atomic_int stop, came;

/* Several signals of each kind arrive in order, each once. */
static atomic_int queued_next;
static void on_queued(int signal, siginfo_t *info, void *context)
{
	(void)context;
	sigset_t expected;
	sigemptyset(&expected);
	sigaddset(&expected, signal);
	sigaddset(&expected, SIGUSR2);
	same_mask(&expected);
	CHECK(info->si_code == SI_QUEUE && info->si_pid == getpid());
	CHECK(info->si_value.sival_int == atomic_fetch_add(&queued_next, 1));
	int saved = errno;
	work(info->si_value.sival_int);
	errno = saved;
}

static void *send_queued(void *count)
{
	for (int i = 0; i < *(int *)count; i++) {
		union sigval value = {.sival_int = i};
		int error;
		while ((error = pthread_sigqueue(worker, SIGRTMIN + 1, value)) != 0) {
			CHECK(error == EAGAIN);
			usleep(100);
		}
		if (i % 16 == 0)
			usleep(50);
	}
	stop = 1;
	return NULL;
}

static void queued(void)
{
	struct sigaction action = {.sa_sigaction = on_queued, .sa_flags = SA_SIGINFO}, old;
	sigemptyset(&action.sa_mask);
	sigaddset(&action.sa_mask, SIGUSR2);
	CHECK(sigaction(SIGRTMIN + 1, &action, NULL) == 0);
	CHECK(sigaction(SIGRTMIN + 1, NULL, &old) == 0);
	CHECK(old.sa_sigaction == on_queued && old.sa_flags & SA_SIGINFO && !(old.sa_flags & SA_RESETHAND));
	int count = 2000;
	sigset_t mask;
	pthread_t sender;
	worker = pthread_self();
	CHECK(pthread_sigmask(SIG_SETMASK, NULL, &mask) == 0);
	CHECK(pthread_create(&sender, NULL, send_queued, &count) == 0);
	for (int step = 0; !stop; step++) {
		work(step);
		if (step % 64 == 0)
			same_mask(&mask);
	}
	CHECK(pthread_join(sender, NULL) == 0);
	same_mask(&mask);
	CHECK(queued_next == count);
}

/* Timers, with handlers that nest, on a stack of their own, and jump away now and then. */
static sigjmp_buf home;
static volatile sig_atomic_t may_jump, depth;
static void on_timer(int signal)
{
	(void)signal;
	int saved = errno;
	came++;
	if (depth < 3) {
		depth++;
		work(came);
		depth--;
	}
	errno = saved;
	if (may_jump && came % 5 == 0) {
		depth = 0;
		siglongjmp(home, 1);
	}
}

/* The thread may get fewer standard signals than were sent, but none late, and none without its value. */
static atomic_int last = -1;
static void on_standard(int signal, siginfo_t *info, void *context)
{
	(void)signal, (void)context;
	int saved = errno, value = info->si_value.sival_int;
	CHECK(info->si_code == SI_QUEUE && info->si_pid == getpid() && value > last);
	last = value;
	came++;
	work(value);
	errno = saved;
}

static void *send_standard(void *unused)
{
	(void)unused;
	for (int i = 0; came < 300; i++) {
		union sigval value = {.sival_int = i};
		CHECK(pthread_sigqueue(worker, SIGUSR1, value) == 0);
		if (i % 16 == 0)
			usleep(50);
	}
	stop = 1;
	return NULL;
}

static void standard(void)
{
	struct sigaction action = {.sa_sigaction = on_standard, .sa_flags = SA_SIGINFO};
	CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
	sigset_t mask;
	pthread_t sender;
	worker = pthread_self();
	CHECK(pthread_sigmask(SIG_SETMASK, NULL, &mask) == 0);
	CHECK(pthread_create(&sender, NULL, send_standard, NULL) == 0);
	for (int step = 0; !stop; step++)
		work(step);
	CHECK(pthread_join(sender, NULL) == 0);
	same_mask(&mask);
}

static void timers(void)
{
	static char stack[256 << 10];
	stack_t alternative = {.ss_sp = stack, .ss_size = sizeof stack};
	CHECK(sigaltstack(&alternative, NULL) == 0);
	struct sigaction action = {.sa_handler = on_timer, .sa_flags = SA_NODEFER | SA_RESTART};
	CHECK(sigaction(SIGALRM, &action, NULL) == 0);
	action.sa_flags = SA_ONSTACK;
	CHECK(sigaction(SIGVTALRM, &action, NULL) == 0);
	struct itimerval often = {.it_interval = {.tv_usec = 200}, .it_value = {.tv_usec = 200}}, never = {0};
	sigset_t mask;
	CHECK(pthread_sigmask(SIG_SETMASK, NULL, &mask) == 0);
	CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0 && setitimer(ITIMER_VIRTUAL, &often, NULL) == 0);
	volatile int step = 0;
	for (int round = 0; round < 2; round++) {
		may_jump = 0;
		if (sigsetjmp(home, 1) == 0 || came < 300 * (round + 1)) {
			may_jump = round;
			for (int from = came; came < 300 * (round + 1) && came - from < 100; step++)
				work(step);
		}
		may_jump = 0;
	}
	CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0 && setitimer(ITIMER_VIRTUAL, &never, NULL) == 0);
	depth = 0;
	same_mask(&mask);
	for (step = 0; step < 1000; step++)
		work(step);
}

/* A one-shot handler runs once, and the next signal has its default action. */
static void on_once(int signal)
{
	struct sigaction now;
	CHECK(sigaction(signal, NULL, &now) == 0 && now.sa_handler == SIG_DFL);
	came++;
	work(came);
}

static void *send_once(void *interval)
{
	for (;;) { /* until a second signal arrives that did not merge with the first */
		usleep(*(useconds_t *)interval);
		pthread_kill(worker, SIGUSR1);
	}
	return NULL;
}

static void once(void)
{
	for (int round = 0; round < 16; round++) {
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			char name[64];
			snprintf(name, sizeof name, "once%d", round);
			make(name);
			came = 0;
			struct sigaction action = {.sa_handler = on_once, .sa_flags = SA_RESETHAND}, old;
			if (round % 2 == 0) {
				CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
				CHECK(sigaction(SIGUSR1, NULL, &old) == 0);
				CHECK(old.sa_handler == on_once && old.sa_flags & SA_RESETHAND && !(old.sa_flags & SA_SIGINFO));
			} else {
				CHECK(sysv_signal(SIGUSR1, on_once) == SIG_DFL);
			}
			pthread_t sender;
			worker = pthread_self();
			/* Without an interval the second signal arrives while the first one's handler starts. */
			useconds_t interval = round < 2 ? 2000 : 0;
			CHECK(pthread_create(&sender, NULL, send_once, &interval) == 0);
			for (int step = 0;; step++)
				work(step);
		}
		int status;
		CHECK(waitpid(child, &status, 0) == child);
		if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGUSR1) {
			fprintf(stderr, "round %d: status %#x\n", round, status);
			abort();
		}
	}
}

/* The handlers that the library returns to the program, by each way to set them. */
static void first(int signal) { (void)signal; came++; }
static void second(int signal) { (void)signal; came += 100; }

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
static void told(void)
{
	CHECK(signal(SIGUSR1, first) == SIG_DFL && signal(SIGUSR1, second) == first);
	CHECK(sigset(SIGUSR1, first) == second && sigset(SIGUSR1, SIG_HOLD) == first);
	CHECK(sigset(SIGUSR1, second) == SIG_HOLD && signal(SIGUSR1, SIG_IGN) == second);
	CHECK(raise(SIGUSR1) == 0 && came == 0);
	CHECK(signal(SIGUSR1, first) == SIG_IGN && raise(SIGUSR1) == 0 && came == 1);
	struct sigaction old, action = {.sa_handler = second, .sa_flags = SA_NODEFER};
	CHECK(sigaction(SIGUSR1, &action, &old) == 0 && old.sa_handler == first && old.sa_flags & SA_RESTART);
	CHECK(raise(SIGUSR1) == 0 && came == 101);
	CHECK(siginterrupt(SIGUSR1, 0) == 0 && sigaction(SIGUSR1, NULL, &old) == 0);
	CHECK(old.sa_handler == second && old.sa_flags & SA_RESTART && old.sa_flags & SA_NODEFER);
	CHECK(raise(SIGUSR1) == 0 && came == 201);
	CHECK(sigaction(SIGKILL, &action, NULL) == -1 && errno == EINVAL);
	CHECK(sigaction(99, &action, NULL) == -1 && errno == EINVAL);
	CHECK(sigaction(SIGUSR1, &old, NULL) == 0 && system("kill -USR1 $PPID") == 0);
	CHECK(came == 301);
	/* A handler that is set without libc's function. */
	struct { void *handler; unsigned long flags; void *restorer; unsigned long mask; } raw;
	CHECK(syscall(SYS_rt_sigaction, SIGUSR1, NULL, &raw, 8) == 0);
	CHECK(syscall(SYS_rt_sigaction, SIGUSR2, &raw, NULL, 8) == 0);
	for (int step = 0; step < 5000; step++)
		work(step);
}

int main(int argc, char **argv)
{
	(void)argc;
	make("signals");
	for (int step = 0; step < 1000; step++)
		work(step);
	if (!strcmp(argv[1], "queued")) queued();
	else if (!strcmp(argv[1], "standard")) standard();
	else if (!strcmp(argv[1], "timers")) timers();
	else if (!strcmp(argv[1], "once")) once();
	else if (!strcmp(argv[1], "told")) told();
	else return 2;
	for (int at = 0; at < PAGES; at++) {
		char page[PAGE];
		CHECK(pread(file, page, PAGE, (off_t)at * PAGE) == PAGE && page[0] == 'a' + at % 26);
	}
	return 0;
}
