//! The suite `shared`: hits in a cache that another process has, by its read-only mapping, beside hits in a private cache.
//!
//! The client is in the process of its server, which makes no difference to a hit: it reads by a mapping of its own, with page
//! tables of its own. Both caches have the file's bytes, each in its memory.

use std::cell::OnceCell;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use millpond::internals::shared::{
    ClientMemory, MemoryChoice, SharedCache, SharedClient, SharedReader,
};
use millpond::{Advice, Engine, EngineBuilder, File, OpenOptions};
use rustix::process::PidfdFlags;

use super::data::{KIB, MIB, TestFile};
use super::harness::{Reader, compare};
use super::load::Load;
use super::outcome::Outcome;
use super::plan::Plan;
use crate::failure::{Context, Result};

const SHARED: &str = "millpond, shared";
const PRIVATE: &str = "millpond, private";

/// The bytes of the file: within the processor's caches, and far beyond them.
const WORKING_SETS: [(&str, u64); 2] = [("1m", MIB), ("256m", 256 * MIB)];
const BLOCKS: [(&str, u32); 3] = [("64", 64), ("4k", 4 * KIB), ("64k", 64 * KIB)];
const MEMORIES: [(&str, MemoryChoice); 2] =
    [("huge", MemoryChoice::Auto), ("small", MemoryChoice::Small)];

/// Measures all cases.
pub fn run(plan: &Plan) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    for (set, bytes) in WORKING_SETS {
        let bytes = plan.bytes(bytes);
        for (memory, choice) in &MEMORIES {
            let cases = BLOCKS.map(|(size, block_bytes)| {
                let case: &'static str = format!("hit-{size}-{set}-{memory}").leak();
                (case, block_bytes)
            });
            if cases.iter().any(|(case, _)| plan.wants(case)) {
                of_memory(&cases, bytes, choice, plan, &mut outcome)?;
            }
        }
    }
    Ok(outcome)
}

fn of_memory(
    cases: &[(&'static str, u32)],
    bytes: u64,
    choice: &MemoryChoice,
    plan: &Plan,
    outcome: &mut Outcome,
) -> Result<()> {
    // Enough for the file, its tables, and the free frames of an eviction policy.
    let builder = || Engine::builder().cache_bytes(bytes + bytes / 4 + 32 * MIB);
    // A file each: an engine reads a file through the engine that has it open already.
    let files = [TestFile::create(&plan.dir, bytes)?, TestFile::create(&plan.dir, bytes)?];
    let (engine, shared) = open(builder().shared(choice.clone()), &files[0])?;
    let cache = engine.shared_cache().expect("it was built so");
    let (client, _attached) = attach(&cache).context("attaching to the cache")?;
    let (case, kind) = (cases[0].0, cache.memory());
    if *choice != MemoryChoice::Small && !kind.may_be_huge() {
        let advice = kind.advice().unwrap_or_default();
        for (case, _) in cases.iter().filter(|(case, _)| plan.wants(case)) {
            outcome.skip(case, SHARED, format!("no huge pages for shared memory: {advice}"));
        }
        return Ok(());
    }
    outcome.note(format!("{case}, and the same of other lengths: {kind}"));
    let (_private_engine, private) = open(builder(), &files[1])?;
    for &(case, block_bytes) in cases.iter().filter(|(case, _)| plan.wants(case)) {
        plan.report_progress(case);
        let load = Load::random(bytes, block_bytes, 1);
        let name = shared.shared_file().expect("of a shared cache");
        let subject = Reader::new(SHARED, |dst: &mut [u8], offset| {
            let read = with_reader(&client, |reader| reader.try_read(name, dst, offset));
            // A miss is the server's.
            read.map_or_else(|| Ok(shared.read_at(dst, offset)?), Ok)
        });
        let baseline =
            Reader::new(PRIVATE, |dst: &mut [u8], offset| Ok(private.read_at(dst, offset)?));
        let misses = engine.stats().misses;
        let rows = compare(case, &subject, &baseline, &load, plan, plan.slice(60, 12))?;
        let missed = engine.stats().misses - misses;
        if missed * 4096 > bytes + bytes / 8 {
            outcome.fail(case, SHARED, format!("{missed} reads went to the server"));
        }
        outcome.rows.extend(rows);
    }
    Ok(())
}

fn open(builder: EngineBuilder, file: &TestFile) -> Result<(Engine, File)> {
    let engine = builder.build().context("building an engine")?;
    let opened = engine.open(file.path(), &OpenOptions::new().read(true));
    let opened = opened.context("opening the file in Millpond")?;
    opened.advise(0, 0, Advice::WillNeed).context("reading the file")?;
    let mut bytes = vec![0; MIB as usize];
    // Twice: the pages have their bit that a hit would set.
    for offset in (0..file.bytes).step_by(bytes.len()).chain((0..file.bytes).step_by(bytes.len())) {
        opened.read_at(&mut bytes, offset).context("reading the file")?;
    }
    Ok((engine, opened))
}

fn attach(cache: &SharedCache) -> io::Result<(SharedClient, impl Sized)> {
    let memory = ClientMemory::create()?;
    let own = rustix::process::getpid();
    let process = rustix::process::pidfd_open(own, PidfdFlags::empty())?;
    let attached = cache.attach(memory.descriptor(), process)?;
    let descriptor: OwnedFd = attached.descriptor().as_fd().try_clone_to_owned()?;
    let client = SharedClient::map(memory, &descriptor)?;
    client.save_fences();
    Ok((client, attached))
}

/// Calls `read` with the reader of the calling thread.
fn with_reader<R>(client: &SharedClient, read: impl FnOnce(&SharedReader) -> R) -> R {
    thread_local! {
        static READER: OnceCell<SharedReader> = const { OnceCell::new() };
    }
    READER.with(|reader| read(reader.get_or_init(|| client.reader().expect("one thread reads"))))
}
