//! Measures the time of a cached read through the C library, and through the crate for comparison.
//!
//!     scripts/install-c                # or with PREFIX, ...
//!     cargo run --release -p millpond-c --example cost -- /usr/local/lib/libmillpond.so [FILE MIB]
//!
//! Both run in one process, in turns (A B B A), on separate files with the same bytes, as each has its own
//! cache. One thread reads 4 KiB blocks of the whole file at random. Prints medians and quartiles of the
//! difference of pairs. The limit is 5 ns or 3 %, whichever is more.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::hint::black_box;

use millpond::{Engine, OpenOptions};

const BLOCK_BYTES: usize = 4096;
const READS: u64 = 20_000;
const PAIRS: usize = 401;

type Create = unsafe extern "C" fn(*const EngineOptions, *mut u64) -> c_int;
type Open = unsafe extern "C" fn(u64, *const c_char, *const c_void, *mut u64) -> c_int;
type Read = unsafe extern "C" fn(u64, *mut c_void, usize, u64) -> i64;

/// The first members of `struct millpond_engine_options`.
#[repr(C)]
struct EngineOptions {
    size: usize,
    cache_bytes: u64,
    rest: [u64; 7],
}

/// The functions of the library that this program measures.
struct Library {
    create: Create,
    open: Open,
    read: Read,
}

impl Library {
    fn load(path: &str) -> Library {
        let path = CString::new(path).unwrap();
        // SAFETY: a string; the library's constructors do nothing.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        // SAFETY: dlerror returns a string after a failure.
        assert!(!library.is_null(), "{:?}", unsafe { CStr::from_ptr(libc::dlerror()) });
        let symbol = |name: &CStr| {
            // SAFETY: the library was loaded above.
            let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
            assert!(!symbol.is_null(), "{name:?}");
            symbol
        };
        // SAFETY: the signatures of millpond.h; a struct of one u64 is passed as a u64.
        unsafe {
            Library {
                create: std::mem::transmute::<*mut c_void, Create>(symbol(
                    c"millpond_engine_create",
                )),
                open: std::mem::transmute::<*mut c_void, Open>(symbol(c"millpond_open")),
                read: std::mem::transmute::<*mut c_void, Read>(symbol(c"millpond_read")),
            }
        }
    }
}

/// Processor time, in nanoseconds, of one of `READS` reads at random offsets.
fn time(blocks: u64, seed: u64, mut read: impl FnMut(&mut [u8], u64)) -> f64 {
    let mut buffer = vec![0; BLOCK_BYTES];
    let mut state = seed | 1;
    let begun = cpu_ns();
    for _ in 0..READS {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        read(&mut buffer, (state % blocks) * BLOCK_BYTES as u64);
    }
    black_box(&buffer);
    (cpu_ns() - begun) as f64 / READS as f64
}

/// Processor time of this thread, so that other load of the machine matters less.
fn cpu_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: valid for a write.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let library = Library::load(&arguments.next().expect("the path of libmillpond.so"));
    let mib: u64 = arguments.next().map_or(256, |text| text.parse().expect("MiB"));
    let (bytes, blocks) = (mib << 20, (mib << 20) / BLOCK_BYTES as u64);
    let dir = tempfile::tempdir().unwrap();
    let paths = ["rust", "c", "control"].map(|name| dir.path().join(name));
    for path in &paths {
        std::fs::write(path, vec![7; bytes as usize]).unwrap();
    }

    let cache_bytes = bytes * 5 / 4;
    let engine = Engine::builder().cache_bytes(cache_bytes).build().unwrap();
    let file = engine.open(&paths[0], &OpenOptions::new().read(true)).unwrap();
    let options = EngineOptions { size: 72, cache_bytes, rest: [0; 7] };
    let (mut of_c, mut file_of_c) = (0, 0);
    let path = CString::new(paths[1].to_str().unwrap()).unwrap();
    // SAFETY: as millpond.h requires.
    unsafe {
        assert_eq!((library.create)(&raw const options, &raw mut of_c), 0);
        let opened = (library.open)(of_c, path.as_ptr(), std::ptr::null(), &raw mut file_of_c);
        assert_eq!(opened, 0);
    }
    let by_rust = |buffer: &mut [u8], offset: u64| {
        assert_eq!(file.read_at(buffer, offset).unwrap(), BLOCK_BYTES);
    };
    let by_c = |buffer: &mut [u8], offset: u64| {
        // SAFETY: the buffer's memory.
        let moved =
            unsafe { (library.read)(file_of_c, buffer.as_mut_ptr().cast(), BLOCK_BYTES, offset) };
        assert_eq!(moved, BLOCK_BYTES as i64);
    };
    let control = Engine::builder().cache_bytes(cache_bytes).build().unwrap();
    let control = control.open(&paths[2], &OpenOptions::new().read(true)).unwrap();
    let by_control = |buffer: &mut [u8], offset: u64| {
        assert_eq!(control.read_at(buffer, offset).unwrap(), BLOCK_BYTES);
    };
    for block in 0..blocks {
        let mut buffer = vec![0; BLOCK_BYTES];
        by_rust(&mut buffer, block * BLOCK_BYTES as u64);
        by_c(&mut buffer, block * BLOCK_BYTES as u64);
        by_control(&mut buffer, block * BLOCK_BYTES as u64);
    }
    let (rust, c) = compare(blocks, by_rust, by_c);
    let bar = (rust.median * 0.03).max(5.0);
    println!("4 KiB of {mib} MiB, cached: {rust} through the crate");
    println!("through C: {c} more; the bar is {bar:.1}");
    let (_, again) = compare(blocks, by_rust, by_control);
    println!("through the crate, by an engine that was built later: {again} more");
}

/// Quartiles of the duration of a read, in nanoseconds.
struct Nanoseconds {
    low: f64,
    median: f64,
    high: f64,
}

impl std::fmt::Display for Nanoseconds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.1} ns ({:.1} to {:.1})", self.median, self.low, self.high)
    }
}

impl Nanoseconds {
    fn of(mut all: Vec<f64>) -> Nanoseconds {
        all.sort_by(f64::total_cmp);
        let quartile = |number: usize| all[all.len() * number / 4];
        Nanoseconds { low: quartile(1), median: quartile(2), high: quartile(3) }
    }
}

/// Prints the time of `one`, and the difference of `other`.
fn compare(
    blocks: u64,
    one: impl FnMut(&mut [u8], u64) + Copy,
    other: impl FnMut(&mut [u8], u64) + Copy,
) -> (Nanoseconds, Nanoseconds) {
    let (mut ones, mut differences) = (Vec::new(), Vec::new());
    for pair in 0..PAIRS as u64 {
        let (first, second) = if pair % 2 == 0 {
            let first = time(blocks, pair, one);
            (first, time(blocks, pair, other))
        } else {
            let second = time(blocks, pair, other);
            (time(blocks, pair, one), second)
        };
        ones.push(first);
        differences.push(second - first);
    }
    (Nanoseconds::of(ones), Nanoseconds::of(differences))
}
