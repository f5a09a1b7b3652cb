//! Options and sizes of any value: `cargo +nightly fuzz run options`.
//!
//! The input's numbers are the options of an engine and a file, and the offsets and lengths of
//! requests. None may panic. A refused value gives an error with a reason, and an accepted one
//! keeps its limit.

#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use millpond::{Advice, BackendChoice, Backing, Engine, Error, File, OpenOptions, WriteMode};

/// Maximum length of a file in memory.
const FILE_BYTES_MAX: u64 = 1 << 20;

#[derive(Arbitrary, Debug)]
struct Input {
    cache_bytes: u64,
    /// Shifts it down, or all would be too large.
    shift: u8,
    dirty_bytes_max: Option<u64>,
    dirty_age_ms: u32,
    readahead_bytes_max: u64,
    reads_in_flight_max: u16,
    hit_path: bool,
    is_null: bool,
    open: Open,
    again: Open,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
struct Open {
    read: bool,
    write: bool,
    append: bool,
    create: bool,
    truncate: bool,
    direct: bool,
    bounce: bool,
    dsync: bool,
    page_bytes: Option<u32>,
    page_shift: u8,
    backing: u8,
    is_back: bool,
}

#[derive(Arbitrary, Debug)]
enum Step {
    Read { offset: u64, len: u16 },
    View { offset: u64, len: u16 },
    Write { offset: u64, len: u16 },
    Append { len: u16 },
    Truncate { len: u64 },
    Punch { offset: u64, len: u64 },
    Zero { offset: u64, len: u64 },
    Allocate { offset: u64, len: u64 },
    Sync { offset: u64, len: u64 },
    Invalidate { offset: u64, len: u64 },
    Advise { offset: u64, len: u64, advice: u8 },
    SeekData { offset: u64 },
    SeekHole { offset: u64 },
    Limit { cache_bytes: u64 },
}

impl Open {
    fn options(&self) -> OpenOptions {
        let backing = match self.backing % 3 {
            0 => Backing::Buffered,
            1 => Backing::Direct,
            _ => Backing::DirectInPlace,
        };
        let mode = if self.is_back { WriteMode::Back } else { WriteMode::Through };
        let mut options = OpenOptions::new().read(self.read).write(self.write).append(self.append);
        options = options.create(self.create).truncate(self.truncate).direct(self.direct);
        options = options.bounce(self.bounce).dsync(self.dsync).backing(backing).write_mode(mode);
        match self.page_bytes {
            Some(bytes) => options.page_bytes(bytes),
            None => options.page_bytes(1u32.checked_shl(self.page_shift.into()).unwrap_or(0)),
        }
    }
}

/// Whether memory has room for a file so long, or nothing has.
fn fits(offset: u64, len: u64) -> bool {
    offset.checked_add(len).is_none_or(|end| end <= FILE_BYTES_MAX || end > i64::MAX as u64)
}

fn step(engine: &Engine, file: &File, step: &Step) -> Result<(), Error> {
    let mut memory = [7; 1 << 16];
    match *step {
        Step::Read { offset, len } => file.read_at(&mut memory[..len.into()], offset).map(drop),
        Step::View { offset, len } => file.view(offset, len.into()).map(drop),
        Step::Write { offset, len } if fits(offset, len.into()) => {
            file.write_at(&memory[..len.into()], offset).map(drop)
        }
        Step::Append { len } if file.len()? < FILE_BYTES_MAX => {
            file.append(&memory[..len.into()]).map(drop)
        }
        Step::Truncate { len } if fits(len, 0) => file.truncate(len),
        Step::Punch { offset, len } => file.punch_hole(offset, len),
        Step::Zero { offset, len } => file.zero_range(offset, len),
        Step::Allocate { offset, len } if fits(offset, len) => file.allocate(offset, len),
        Step::Sync { offset, len } => file.sync_range(offset, len),
        Step::Invalidate { offset, len } => file.invalidate(offset, len),
        Step::Advise { offset, len, advice } => {
            let all = [
                Advice::Normal,
                Advice::Sequential,
                Advice::Random,
                Advice::WillNeed,
                Advice::DontNeed,
                Advice::TornReads,
            ];
            file.advise(offset, len, all[usize::from(advice) % all.len()])
        }
        Step::SeekData { offset } => file.seek_data(offset).map(drop),
        Step::SeekHole { offset } => file.seek_hole(offset).map(drop),
        Step::Limit { cache_bytes } => engine.set_cache_bytes(cache_bytes).map(drop),
        _ => Ok(()),
    }
}

fn is_told(error: &Error) {
    assert!(error.errno() > 0 && !error.to_string().is_empty(), "{error:?}");
}

fuzz_target!(|input: Input| {
    let backend = if input.is_null { BackendChoice::Null } else { BackendChoice::Memory };
    let mut builder = Engine::builder()
        .cache_bytes(input.cache_bytes >> (input.shift % 64))
        .backend(backend)
        .dirty_age_max(std::time::Duration::from_millis(input.dirty_age_ms.into()))
        .readahead_bytes_max(input.readahead_bytes_max)
        .reads_in_flight_max(input.reads_in_flight_max.into())
        .hit_path(input.hit_path);
    if let Some(bytes) = input.dirty_bytes_max {
        builder = builder.dirty_bytes_max(bytes);
    }
    let engine = match builder.build() {
        Ok(engine) => engine,
        Err(error) => return is_told(&error),
    };
    let path = std::env::temp_dir().join(format!("millpond-fuzz-{}", std::process::id()));
    std::fs::write(&path, [1; 5000]).unwrap();
    let first = engine.open(&path, &input.open.options());
    // Beside the first, which decides on page size and mode.
    let second = engine.open(&path, &input.again.options());
    for file in [&first, &second] {
        match file {
            Err(error) => is_told(error),
            Ok(file) => {
                for one in &input.steps {
                    if let Err(error) = step(&engine, file, one) {
                        is_told(&error);
                    }
                    let used = engine.stats().memory_bytes;
                    // docs: below 1 MiB a few KiB more are possible.
                    assert!(used <= engine.cache_bytes() + (64 << 10), "{used} bytes");
                }
            }
        }
    }
});
