//! Model test of versions and lengths: random histories of reads and writes through caches, over a store whose objects
//! change length, appear, vanish and fail half-way.
//!
//! The model's rule: a read returns exactly the store's response for **one** version. That version was current at a moment
//! that the freshness permits, and it is no older than the last write through the same cache that had completed when the
//! read started. Metadata, range and bytes are of that version, and the conditions hold for it. A read fails only with an
//! error that the store may have returned.
//!
//! A failure prints the seed of its history: `MILLPOND_TEST_SEED=...` runs that history first. The seed fixes all
//! operations. Their order may differ if tasks run on several threads or the disk tier is used.
//! `MILLPOND_TEST_SCALE` multiplies the number of histories.

mod below;
mod model;
mod random;

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::{Duration, Instant};

use below::{Below, Entry, Handle, Kind, LEN_MAX, Options, Tags, content};
use bytes::Bytes;
use millpond_objects::{CachedStore, Freshness};
use model::{Age, Answer, Call};
use object_store::path::Path;
use object_store::{
    CopyMode, CopyOptions, GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
    UpdateVersion,
};
use random::Random;

const HISTORIES: u32 = 40;
const TIME_LIMIT: Duration = Duration::from_secs(120);

/// Parameters of a history.
#[derive(Debug)]
struct Plan {
    store: Options,
    freshness: Freshness,
    page_bytes: u32,
    memory_bytes: u64,
    gap_bytes: u64,
    readahead_bytes_max: u64,
    has_disk: bool,
    caches: usize,
    /// Writes to the underlying store directly, as another machine would.
    has_others: bool,
    threads: usize,
    len_max: usize,
    operations: u64,
}

impl Plan {
    fn new(random: &mut Random) -> Plan {
        let age = |ms| Freshness::MaxAge(Duration::from_millis(ms));
        let freshness = random.one_of(&[
            Freshness::Revalidate,
            age(0),
            age(3),
            age(100_000),
            Freshness::Immutable,
        ]);
        let tags = random.one_of(&[Tags::Unique, Tags::OfContent, Tags::Versions, Tags::Nothing]);
        // A change of an object without version is visible only if it was written through the cache.
        let is_blind = tags == Tags::Nothing && freshness == Freshness::Immutable;
        Plan {
            store: Options {
                tags,
                ignores_conditions: random.chance(300),
                faults: random.one_of(&[0, 0, 30, 150]),
            },
            freshness,
            page_bytes: random.one_of(&[4096, 16384]),
            memory_bytes: random.one_of(&[1 << 20, 3 << 20, 32 << 20]),
            gap_bytes: random.one_of(&[0, 10_000, 1 << 20]),
            readahead_bytes_max: random.one_of(&[0, 1 << 20]),
            has_disk: random.chance(250),
            caches: if is_blind { 1 } else { 1 + random.below(2) as usize },
            has_others: !is_blind && random.chance(700),
            threads: random.one_of(&[1, 1, 2]),
            len_max: if random.chance(250) { LEN_MAX } else { 300_000 },
            operations: 40,
        }
    }
}

struct Cache {
    store: CachedStore,
    /// For each path, the entry of the last completed write through this cache.
    written: Vec<AtomicU64>,
    /// For each path, the writes through this cache that began, and those that ended.
    begun: Vec<AtomicU64>,
    ended: Vec<AtomicU64>,
}

struct History {
    plan: Plan,
    below: Arc<Below>,
    paths: Vec<Path>,
    caches: Vec<Cache>,
    contents: AtomicU64,
    failure: Mutex<Option<String>>,
}

/// Polls a future at most `polls` times, then drops it.
async fn polled<T>(future: impl Future<Output = T>, polls: u64) -> Option<T> {
    let mut future = pin!(future);
    let mut left = polls;
    std::future::poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending if left == 0 => Poll::Ready(None),
        Poll::Pending => {
            left -= 1;
            Poll::Pending
        }
    })
    .await
}

impl History {
    fn len(&self, random: &mut Random) -> usize {
        let lens = [0, 1, 2, 9, 10, 4095, 4096, 4097, 9000, 16_384, 50_000, 131_072, 300_000];
        if random.chance(150) { self.plan.len_max } else { random.one_of(&lens) }
    }

    fn next_content(&self, random: &mut Random) -> Bytes {
        let number = self.contents.fetch_add(1, Relaxed);
        if random.chance(150) {
            // Possibly the content of an earlier version.
            return content(random.below(number + 1) % 8, 9000);
        }
        content(number, self.len(random))
    }

    fn meta_of_some_version(
        &self,
        at: usize,
        random: &mut Random,
    ) -> Option<object_store::ObjectMeta> {
        let log = self.below.log(&self.paths[at]);
        let first = if random.chance(600) { log.len().saturating_sub(3) } else { 0 };
        let entry = &log[first + random.below((log.len() - first) as u64) as usize];
        entry.object.as_ref().map(|(_, meta)| meta.clone())
    }

    fn some_range(&self, random: &mut Random) -> std::ops::Range<u64> {
        let start = random.one_of(&[0, 0, 1, 5, 4096, 8192, 9000, 40_000, 131_071, 290_000]);
        let lens = [0, 1, 10, 4096, 5000, 60_000, 300_000, 4_500_000, u64::MAX - 300_000];
        start..start + random.one_of(&lens)
    }

    fn get_options(&self, at: usize, random: &mut Random) -> GetOptions {
        let range = match random.below(5) {
            0 => None,
            1 | 2 => Some(GetRange::Bounded(self.some_range(random))),
            3 => Some(GetRange::Offset(random.one_of(&[0, 1, 5, 4096, 9000, 100_000]))),
            _ => Some(GetRange::Suffix(random.one_of(&[0, 1, 4, 4096, 9000, 100_000]))),
        };
        let mut options = GetOptions::new().with_range(range);
        if random.chance(100) {
            options.range = None;
            options.head = true;
        }
        if random.chance(300) {
            let meta = self.meta_of_some_version(at, random);
            let tag = match random.below(6) {
                0 => Some("*".to_owned()),
                1 => Some("\"none\"".to_owned()),
                2 => meta
                    .as_ref()
                    .and_then(|m| m.e_tag.as_ref())
                    .map(|tag| format!("\"none\", {tag}")),
                _ => meta.as_ref().and_then(|meta| meta.e_tag.clone()),
            };
            let modified = meta.as_ref().map(|meta| meta.last_modified);
            match random.below(5) {
                0 | 1 => options.if_match = tag,
                2 => options.if_none_match = tag,
                3 => options.if_modified_since = modified,
                _ => options.if_unmodified_since = modified,
            }
            if random.chance(100) {
                options.version = meta.and_then(|meta| meta.version);
            }
        }
        options
    }

    fn age(&self) -> Age {
        match self.plan.freshness {
            Freshness::MaxAge(age) => Age::Most(age),
            Freshness::Immutable => Age::Any,
            _ => Age::Most(Duration::ZERO),
        }
    }

    async fn read(&self, cache: &Cache, random: &mut Random) -> Result<(), String> {
        let at = random.below(self.paths.len() as u64) as usize;
        let path = &self.paths[at];
        let polls = if random.chance(100) { random.below(6) } else { u64::MAX };
        let oldest = cache.written[at].load(Relaxed) as usize;
        let ended = cache.ended[at].load(Relaxed);
        let start = Instant::now();
        let call = |log| {
            let (options, age, end) = (&self.plan.store, self.age(), Instant::now());
            let is_beside_write = cache.begun[at].load(Relaxed) > ended;
            Call { options, age, log, oldest, is_beside_write, start, end }
        };
        if random.chance(250) {
            let ranges: Vec<_> = (0..random.below(4)).map(|_| self.some_range(random)).collect();
            let Some(got) = polled(cache.store.get_ranges(path, &ranges), polls).await else {
                return Ok(());
            };
            let log = self.below.log(path);
            let checked = call(&log).check_ranges(&ranges, &got);
            return checked.map_err(|why| format!("get_ranges of {path}, {ranges:?}: {why}"));
        }
        let options = self.get_options(at, random);
        let pieces = if random.chance(100) { random.below(3) as usize } else { usize::MAX };
        let get = async {
            let result = cache.store.get_opts(path, options.clone()).await?;
            Ok(Answer::read(result, pieces).await)
        };
        let Some(got) = polled(get, polls).await else { return Ok(()) };
        let log = self.below.log(path);
        let checked = call(&log).check_get(&options, &got);
        checked.map_err(|why| {
            let now = log.last().and_then(|entry| entry.object.as_ref()).map(|(_, meta)| meta);
            format!("get of {path}, {options:?}: {why}; the store now has {now:?}")
        })
    }

    /// Writes through a cache, and records the entry if the write completed.
    async fn write(&self, cache: &Cache, random: &mut Random) {
        let at = random.below(self.paths.len() as u64) as usize;
        let (path, other) = (&self.paths[at], random.below(self.paths.len() as u64) as usize);
        let begun = self.below.log(path).len();
        let polls = if random.chance(50) { random.below(6) } else { u64::MAX };
        let bytes = self.next_content(random);
        let meta = self.meta_of_some_version(at, random);
        let mode = match (random.below(6), meta) {
            (0, _) => PutMode::Create,
            (1, Some(meta)) => {
                PutMode::Update(UpdateVersion { e_tag: meta.e_tag, version: meta.version })
            }
            _ => PutMode::Overwrite,
        };
        let create = CopyOptions::new().with_mode(CopyMode::Create);
        let (which, store) = (random.below(10), &cache.store);
        let is_copy = (5..8).contains(&which);
        let write = async {
            match which {
                0..=3 => store
                    .put_opts(path, bytes.clone().into(), PutOptions::from(mode))
                    .await
                    .map(drop),
                4 => {
                    let mut upload = store.put_multipart(path).await?;
                    let half = bytes.len() / 2;
                    upload.put_part(bytes.slice(..half).into()).await?;
                    upload.put_part(bytes.slice(half..).into()).await?;
                    upload.complete().await.map(drop)
                }
                5 if other != at => store.copy(&self.paths[other], path).await,
                6 if other != at => store.copy_opts(&self.paths[other], path, create).await,
                7 if other != at => store.rename(&self.paths[other], path).await,
                _ => store.delete(path).await,
            }
        };
        let changed = if which == 7 && other != at { vec![at, other] } else { vec![at] };
        for at in &changed {
            cache.begun[*at].fetch_add(1, Relaxed);
        }
        let _ = polled(write, polls).await;
        for at in &changed {
            cache.ended[*at].fetch_add(1, Relaxed);
        }
        // A failed or dropped write counts as ended.
        let is_it = |entry: &Entry| match entry.kind {
            Kind::Put => entry.object.as_ref().is_some_and(|(there, _)| *there == bytes),
            Kind::Copy => is_copy,
            Kind::Delete => which >= 5,
            Kind::Start => false,
        };
        let log = self.below.log(path);
        // The first entry that matches: other writes may have the same content.
        if let Some(entry) = log.iter().skip(begun).position(is_it) {
            cache.written[at].fetch_max((begun + entry) as u64, Relaxed);
        }
    }

    /// Writes to the underlying store directly, as another machine would.
    async fn write_past_caches(&self, random: &mut Random) {
        let path = &self.paths[random.below(self.paths.len() as u64) as usize];
        let store = Handle(Arc::clone(&self.below));
        let bytes = self.next_content(random);
        let _ = match random.below(4) {
            0 => store.delete(path).await,
            _ => store.put(path, bytes.into()).await.map(drop),
        };
    }

    async fn task(self: Arc<Self>, number: usize, mut random: Random) {
        for _ in 0..self.plan.operations {
            let cache = &self.caches[random.below(self.caches.len() as u64) as usize];
            let outcome = match number {
                0 if self.plan.has_others => {
                    self.write_past_caches(&mut random).await;
                    Ok(())
                }
                _ if random.chance(150) => {
                    self.write(cache, &mut random).await;
                    Ok(())
                }
                _ => self.read(cache, &mut random).await,
            };
            if let Err(why) = outcome {
                self.failure.lock().unwrap().get_or_insert(why);
            }
            if self.failure.lock().unwrap().is_some() {
                return;
            }
            for _ in 0..random.below(8) {
                tokio::task::yield_now().await;
            }
            if random.chance(30) {
                tokio::time::sleep(Duration::from_millis(random.below(5))).await;
            }
        }
    }
}

/// Runs the history of a seed; returns the number of saved requests.
fn run(seed: u64) -> u64 {
    let mut random = Random(seed);
    let plan = Plan::new(&mut random);
    let runtime = match plan.threads {
        1 => tokio::runtime::Builder::new_current_thread().enable_time().build(),
        threads => {
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            builder.worker_threads(threads).enable_time().build()
        }
    };
    let plan_text = format!("MILLPOND_TEST_SEED={seed}: {plan:?}");
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    runtime.unwrap().block_on(async {
        let paths: Vec<_> = (0..3).map(|number| Path::from(format!("objects/{number}"))).collect();
        let below = Arc::new(Below::new(plan.store.clone(), random.fork(), &paths));
        let cache = |number: usize| {
            let builder = CachedStore::builder(Arc::new(Handle(Arc::clone(&below))));
            let mut builder = builder
                // The disk tier uses half a MiB of it.
                .memory_bytes(plan.memory_bytes.max(if plan.has_disk { 3 << 20 } else { 0 }))
                .page_bytes(plan.page_bytes)
                .freshness(plan.freshness)
                .gap_bytes(plan.gap_bytes)
                .readahead_bytes_max(plan.readahead_bytes_max);
            if plan.has_disk {
                builder = builder.disk(dir.path().join(number.to_string()), 2 << 20);
            }
            let zeros = || paths.iter().map(|_| AtomicU64::new(0)).collect();
            let (written, begun, ended) = (zeros(), zeros(), zeros());
            Cache { store: builder.build().unwrap(), written, begun, ended }
        };
        let caches = (0..plan.caches).map(cache).collect();
        let (contents, failure) = (AtomicU64::new(1), Mutex::new(None));
        let history = Arc::new(History { plan, below, paths, caches, contents, failure });
        let tasks: Vec<_> = (0..4)
            .map(|number| tokio::spawn(Arc::clone(&history).task(number, random.fork())))
            .collect();
        let all = futures_util::future::try_join_all(tasks);
        match tokio::time::timeout(TIME_LIMIT, all).await {
            Ok(ended) => drop(ended.unwrap_or_else(|error| panic!("{plan_text}: {error}"))),
            Err(_) => panic!("{plan_text}: the history does not end"),
        }
        if let Some(why) = history.failure.lock().unwrap().take() {
            panic!("{plan_text}: {why}");
        }
        history.caches.iter().map(|cache| cache.store.stats().requests_saved).sum()
    })
}

/// Goal: under any history, each read is a response that the model permits.
/// Method: histories of four tasks on three objects; each history has a separate store, caches and freshness.
#[test]
fn each_read_is_a_response_of_the_store_for_one_version() {
    let variable = |name| std::env::var(name).ok();
    let scale = variable("MILLPOND_TEST_SCALE").and_then(|scale| scale.parse().ok());
    let histories = (f64::from(HISTORIES) * scale.unwrap_or(1.0)).max(1.0) as u64;
    let seed = variable("MILLPOND_TEST_SEED").and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        now.as_nanos() as u64
    });
    println!("MILLPOND_TEST_SEED={seed}");
    let saved: u64 = (0..histories).map(|number| run(seed.wrapping_add(number))).sum();
    println!("{histories} histories, {saved} requests saved");
    // Otherwise the caches were hardly used.
    assert!(saved >= histories / 10, "{saved} requests saved in {histories} histories");
}
