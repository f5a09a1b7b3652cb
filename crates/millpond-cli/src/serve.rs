//! `millpond serve`: one cache of an object store for all processes of a user.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use millpond_objects::{CachedStore, Freshness};
use millpond_serve::{MemoryChoice, Server, default_socket, set_server_memory};
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use tokio::signal::unix::{SignalKind, signal};

use crate::failure::{Context, Failure, REFUSED, Result};
use crate::run::parse_size;

/// Serves one cache of an object store to all processes of this user
///
/// Programs read it by `millpond_serve::SharedStore`: cached bytes without a system call, others by this
/// server. Runs until SIGTERM or SIGINT. The environment has the keys for S3: AWS_ACCESS_KEY_ID,
/// AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT. Exit status: 2 for settings that can't be used, 1 if
/// the server can't run.
#[derive(Debug, clap::Args)]
pub struct ServeArgs {
    /// The path of the socket [default: millpond/serve.sock in XDG_RUNTIME_DIR]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// The store: s3://BUCKET, file:///DIR or memory:///. A server has one store
    #[arg(long, value_name = "URL", required_unless_present = "set_memory")]
    store: Option<String>,

    /// The limit of the cache's memory, such as 4G
    #[arg(long, value_name = "SIZE", value_parser = parse_size, required_unless_present = "set_memory")]
    memory: Option<u64>,

    /// A second tier: a directory on a local disk, and the limit of its size
    #[arg(long, num_args = 2, value_names = ["DIR", "SIZE"])]
    disk: Option<Vec<String>>,

    /// How old a cached version may be: immutable, revalidate, or a time such as 30s
    #[arg(long, default_value = "revalidate", value_parser = parse_freshness)]
    freshness: Freshness,

    /// The size of a page, such as 16K
    #[arg(long, value_name = "SIZE", default_value = "16K", value_parser = parse_size)]
    page: u64,

    /// The kind of shared memory: auto, small, or a directory of a tmpfs
    #[arg(long, value_name = "KIND", default_value = "auto")]
    shared_memory: String,

    /// Publish statistics for `millpond top`, four times a second
    #[arg(long)]
    stats: bool,

    /// Print the settings and the kind of shared memory, and exit
    #[arg(long)]
    check: bool,

    /// Change the memory limit of the running server, at most to its --memory, and exit
    #[arg(long, value_name = "SIZE", value_parser = parse_size, conflicts_with_all = ["store", "memory", "disk", "check"])]
    set_memory: Option<u64>,
}

fn parse_freshness(text: &str) -> std::result::Result<Freshness, String> {
    let seconds = |text: &str, unit: f64| {
        let number: f64 = text.parse().ok()?;
        Duration::try_from_secs_f64(number * unit).ok().filter(|age| !age.is_zero())
    };
    let age = match text {
        "immutable" => return Ok(Freshness::Immutable),
        "revalidate" => return Ok(Freshness::Revalidate),
        age => [("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0)]
            .into_iter()
            .find_map(|(unit, size)| seconds(age.strip_suffix(unit)?, size)),
    };
    age.map(Freshness::MaxAge)
        .ok_or_else(|| "neither immutable, nor revalidate, nor a time such as 30s, 5m or 2h".into())
}

fn refused(what: impl Into<String>) -> Failure {
    Failure::new(REFUSED, what)
}

/// Opens the store at a URL.
fn open_store(url: &str) -> Result<Arc<dyn ObjectStore>> {
    let Some((scheme, rest)) = url.split_once("://") else {
        return Err(refused(format!("--store {url:?} is not a URL: SCHEME://...")));
    };
    match scheme {
        "memory" if rest.trim_matches('/').is_empty() => {
            Ok(Arc::new(object_store::memory::InMemory::new()))
        }
        "memory" => Err(refused(format!("--store {url:?}: a store in memory has no path"))),
        "file" if rest.starts_with('/') => {
            let store = LocalFileSystem::new_with_prefix(rest)
                .map_err(|error| refused(format!("--store {url:?}: {error}")))?;
            Ok(Arc::new(store))
        }
        "file" => Err(refused(format!("--store {url:?} has no absolute path: file:///DIR"))),
        "s3" => {
            let bucket = rest.trim_end_matches('/');
            if bucket.is_empty() || bucket.contains('/') {
                let what = format!("--store {url:?}: the whole bucket is served: s3://BUCKET");
                return Err(refused(what));
            }
            open_s3(bucket)
        }
        _ => Err(refused(format!("--store: unknown scheme {scheme:?}: use s3, file or memory"))),
    }
}

#[cfg(not(feature = "s3"))]
fn open_s3(_: &str) -> Result<Arc<dyn ObjectStore>> {
    Err(refused("this program was built without S3: build it with `--features s3`"))
}

#[cfg(feature = "s3")]
fn open_s3(bucket: &str) -> Result<Arc<dyn ObjectStore>> {
    let store = object_store::aws::AmazonS3Builder::from_env().with_bucket_name(bucket).build();
    Ok(Arc::new(store.map_err(|error| refused(format!("--store s3://{bucket}: {error}")))?))
}

fn human(bytes: u64) -> String {
    match bytes {
        bytes if bytes >= 1 << 30 => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
        bytes => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
    }
}

/// The settings, checked.
struct Settings {
    url: String,
    store: Arc<dyn ObjectStore>,
    socket: PathBuf,
    memory_bytes: u64,
    page_bytes: u32,
    disk: Option<(PathBuf, u64)>,
    freshness: Freshness,
    shared_memory: MemoryChoice,
    is_published: bool,
}

impl ServeArgs {
    fn socket(&self) -> Result<PathBuf> {
        self.socket.clone().or_else(default_socket).ok_or_else(|| {
            refused("XDG_RUNTIME_DIR is not set to an absolute path: set it, or give --socket PATH")
        })
    }

    fn settings(&self) -> Result<Settings> {
        let disk = match self.disk.as_deref() {
            Some([dir, size]) => {
                let bytes = parse_size(size)
                    .map_err(|error| refused(format!("--disk {dir} {size:?}: {error}")))?;
                Some((PathBuf::from(dir), bytes))
            }
            _ => None,
        };
        let page_bytes = u32::try_from(self.page)
            .map_err(|_| refused(format!("--page {}: too large", self.page)))?;
        let shared_memory = match self.shared_memory.as_str() {
            "auto" => MemoryChoice::Auto,
            "small" => MemoryChoice::Small,
            dir if dir.starts_with('/') => MemoryChoice::Directory(dir.into()),
            other => {
                let what = format!("--shared-memory {other:?}: neither auto, nor small, nor /DIR");
                return Err(refused(what));
            }
        };
        let url = self.store.clone().expect("clap requires it");
        Ok(Settings {
            store: open_store(&url)?,
            url,
            socket: self.socket()?,
            memory_bytes: self.memory.expect("clap requires it"),
            page_bytes,
            disk,
            freshness: self.freshness,
            shared_memory,
            is_published: self.stats,
        })
    }
}

impl Settings {
    /// The cache. `opens_disk`: with its second tier, which one server at a time may use.
    fn cache(&self, opens_disk: bool) -> Result<CachedStore> {
        let mut builder = CachedStore::builder(Arc::clone(&self.store))
            .memory_bytes(self.memory_bytes)
            .page_bytes(self.page_bytes)
            .freshness(self.freshness)
            .shared(self.shared_memory.clone())
            .published(opens_disk && self.is_published);
        if opens_disk && let Some((dir, bytes)) = &self.disk {
            builder = builder.disk(dir, *bytes);
        }
        builder.build().map_err(|error| refused(error.to_string()))
    }

    fn print(&self, cache: &CachedStore) {
        let shared = cache.shared_cache().expect("built as shared");
        println!("socket:        {}", self.socket.display());
        println!("store:         {} ({})", self.url, self.store);
        println!("memory:        {}", human(self.memory_bytes));
        match &self.disk {
            Some((dir, bytes)) => println!("disk:          {}, {}", dir.display(), human(*bytes)),
            None => println!("disk:          none"),
        }
        match self.freshness.max_age() {
            None => println!("freshness:     immutable"),
            Some(Duration::ZERO) => println!("freshness:     revalidate"),
            Some(age) => println!("freshness:     {age:?}"),
        }
        println!("page:          {} bytes", self.page_bytes);
        println!("shared memory: {}", shared.memory());
        if let Some(command) = shared.memory().advice() {
            println!("               with huge pages hits would be faster; as root: {command}");
        }
    }
}

pub fn run(args: &ServeArgs) -> Result<()> {
    if let Some(bytes) = args.set_memory {
        let socket = args.socket()?;
        let reached = set_server_memory(&socket, bytes)
            .context(format!("the server at {}", socket.display()))?;
        println!("the limit is {}", human(reached));
        return Ok(());
    }
    let settings = args.settings()?;
    if args.check {
        settings.print(&settings.cache(false)?);
        return Ok(());
    }
    let cache = settings.cache(true)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("start of the runtime")?;
    runtime.block_on(async {
        let server = Server::bind(cache.clone(), &settings.socket)
            .context(format!("--socket {}", settings.socket.display()))?;
        let mut terminate = signal(SignalKind::terminate()).context("signals")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("signals")?;
        settings.print(&cache);
        println!("serving");
        tokio::select! {
            ended = server.run() => ended.context("the server"),
            _ = terminate.recv() => Ok(()),
            _ = interrupt.recv() => Ok(()),
        }
    })
}
