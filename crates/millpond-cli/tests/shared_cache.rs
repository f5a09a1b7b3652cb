//! Tests of `millpond run --cache-shared`: one limit for all processes of a run.

use std::fs::File;
use std::process::Command;

const PRELUDE: &str = r#"
import ctypes, os, random, signal, time
MIB = 1 << 20
BYTES = 24 * MIB

def anonymous(pid):
    with open(f'/proc/{pid}/status') as status:
        return next(int(line.split()[1]) for line in status if line.startswith('RssAnon')) * 1024

class Reader:
    """A child that reads a file of its own at random, without end."""
    def __init__(self, name, part=BYTES):
        told, tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            # It ends with the program in every case.
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            fd = os.open(name, os.O_RDONLY)
            os.pread(fd, 4096, 0)
            os.write(tell, b'%d' % anonymous(os.getpid()))
            while True: os.pread(fd, 4096, random.randrange(0, part, 4096))
        self.base = int(os.read(told, 100))
        os.close(told); os.close(tell)

    def grown(self):
        return anonymous(self.pid) - self.base

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

def wait(done):
    # Long enough for any machine.
    for _ in range(2400):
        if done(): return
        time.sleep(0.05)
    raise AssertionError('it never came')
"#;

/// Under a limit of 32 MiB, with four files.
#[track_caller]
fn run(options: &[&str], script: &str) {
    let dir = tempfile::tempdir().unwrap();
    for name in ["0", "1", "2", "3"] {
        File::create(dir.path().join(name)).unwrap().set_len(64 << 20).unwrap();
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_millpond"));
    command
        .args(["run", "--eager", "--quiet", "--backing", "buffered", "--cache", "32m"])
        .args(options);
    command.args(["--", "python3", "-c", &format!("{PRELUDE}{script}")]).current_dir(dir.path());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Goal: readers that together want three times the limit stay within it, plus 4 MiB and a fixed amount for
/// each engine. When the others are killed, the last one gets all that it can use. Four limits would be 96
/// MiB.
#[test]
fn readers_share_one_limit_and_inherit_it() {
    run(
        &["--cache-shared"],
        "readers = [Reader(str(number)) for number in range(4)]\n\
         def sum_of_all():\n\
         \x20   grown = sum(reader.grown() for reader in readers)\n\
         \x20   assert grown <= (32 + len(readers) * 8) * MIB, grown\n\
         \x20   return grown\n\
         wait(lambda: sum_of_all() > 30 * MIB)\n\
         for _ in range(20): sum_of_all(); time.sleep(0.05)\n\
         while len(readers) > 1:\n\
         \x20   readers.pop().kill()\n\
         \x20   sum_of_all()\n\
         wait(lambda: sum_of_all() > 22 * MIB)\n\
         readers.pop().kill()\n",
    );
}

/// Goal: a process that starts when the whole cache is taken gets a part; a process that reads a small file
/// repeatedly keeps its part.
#[test]
fn a_newcomer_gets_a_part_and_a_small_set_stays() {
    run(
        &["--cache-shared"],
        "small = Reader('0', 3 * MIB)\n\
         wait(lambda: small.grown() > 2 * MIB)\n\
         first = Reader('1', 64 * MIB)\n\
         wait(lambda: first.grown() > 20 * MIB)\n\
         second = Reader('2', 64 * MIB)\n\
         wait(lambda: second.grown() > 10 * MIB)\n\
         assert small.grown() > 2 * MIB, small.grown()\n\
         for reader in (small, first, second): reader.kill()\n",
    );
}
