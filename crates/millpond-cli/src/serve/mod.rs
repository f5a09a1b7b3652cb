//! `millpond serve`: one cache of an object store for all processes of a user.
//!
//! - [`stores`]: opens the store.
//! - [`endpoint`]: the S3 endpoint over the same cache; [`endpoint_file`]: how programs find it.

mod endpoint;
mod endpoint_file;
mod stores;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use millpond_objects::{CachedStore, Freshness};
use millpond_serve::{MemoryChoice, Server, default_socket, set_server_memory};
use tokio::signal::unix::{SignalKind, signal};

use self::endpoint::{EndpointSettings, RunningEndpoint};
use self::endpoint_file::EndpointFile;
use self::stores::OpenedStore;
use crate::failure::{Context, Failure, REFUSED, Result};
use crate::run::parse_size;

/// Serves one cache of an object store to all processes of this user
///
/// Programs read it by `millpond_serve::SharedStore`: cached bytes without a system call, others by this
/// server. With --endpoint, programs in any language use it over the S3 protocol. Runs until SIGTERM or
/// SIGINT. The environment has the keys for S3: AWS_ACCESS_KEY_ID,
/// AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT. Exit status: 2 for settings that can't be used, 1 if
/// the server can't run.
#[derive(Debug, clap::Args)]
pub struct ServeArgs {
    /// The path of the socket [default: millpond/serve.sock in XDG_RUNTIME_DIR]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// The store: s3://BUCKET, file:///DIR or memory:///. A server has one store
    #[arg(long, value_name = "URL", required_unless_present_any = ["set_memory", "print_endpoint"])]
    store: Option<String>,

    /// The limit of the cache's memory, such as 4G
    #[arg(long, value_name = "SIZE", value_parser = parse_size,
        required_unless_present_any = ["set_memory", "print_endpoint"])]
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

    /// Serve the store over the S3 protocol as well, on a loopback address or on a port of 127.0.0.1. Without
    /// ADDR, on any free port
    #[arg(long, value_name = "ADDR", num_args = 0..=1, default_missing_value = "127.0.0.1:0",
        value_parser = endpoint::parse_address)]
    endpoint: Option<SocketAddr>,

    /// Serve the store over the S3 protocol as well, on a Unix socket
    #[arg(long, value_name = "PATH")]
    endpoint_socket: Option<PathBuf>,

    /// The file of the endpoint's access key, which is generated if it does not exist [default: credentials
    /// in the directory of the server's socket]
    #[arg(long, value_name = "PATH")]
    key_file: Option<PathBuf>,

    /// Publish statistics for `millpond top`, four times a second
    #[arg(long)]
    stats: bool,

    /// Print the settings and the kind of shared memory, and exit
    #[arg(long)]
    check: bool,

    /// Change the memory limit of the running server, at most to its --memory, and exit
    #[arg(long, value_name = "SIZE", value_parser = parse_size, conflicts_with_all = ["store", "memory", "disk", "check"])]
    set_memory: Option<u64>,

    /// Print how to reach the endpoint of the running server, with its key, as JSON, and exit
    #[arg(long, conflicts_with_all = ["store", "memory", "disk", "check", "endpoint", "endpoint_socket", "set_memory"])]
    print_endpoint: bool,
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

fn human(bytes: u64) -> String {
    match bytes {
        bytes if bytes >= 1 << 30 => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
        bytes => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
    }
}

/// The settings, checked.
struct Settings {
    store: OpenedStore,
    socket: PathBuf,
    memory_bytes: u64,
    page_bytes: u32,
    disk: Option<(PathBuf, u64)>,
    freshness: Freshness,
    shared_memory: MemoryChoice,
    is_published: bool,
    endpoint: Option<EndpointSettings>,
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
        let store = OpenedStore::open(self.store.as_deref().expect("clap requires it"))?;
        let socket = self.socket()?;
        let endpoint = EndpointSettings::new(
            (self.endpoint, self.endpoint_socket.as_deref()),
            self.key_file.as_deref(),
            socket.parent().unwrap_or(Path::new("")),
        )?;
        Ok(Settings {
            store,
            socket,
            memory_bytes: self.memory.expect("clap requires it"),
            page_bytes,
            disk,
            freshness: self.freshness,
            shared_memory,
            is_published: self.stats,
            endpoint,
        })
    }
}

impl Settings {
    /// The cache. `opens_disk`: with its second tier, which one server at a time may use.
    fn cache(&self, opens_disk: bool) -> Result<CachedStore> {
        let mut builder = CachedStore::builder(Arc::clone(&self.store.store))
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
        println!("store:         {} ({})", self.store.url, self.store.store);
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

impl Settings {
    async fn serve(&self, cache: CachedStore) -> Result<()> {
        let server = Server::bind(cache.clone(), &self.socket)
            .context(format!("--socket {}", self.socket.display()))?;
        EndpointFile::remove_stale(&self.socket).context("the file of an earlier endpoint")?;
        let mut terminate = signal(SignalKind::terminate()).context("signals")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("signals")?;
        self.print(&cache);
        let mut endpoint = match &self.endpoint {
            Some(settings) => {
                Some(RunningEndpoint::start(settings, &self.store, &cache, &self.socket)?)
            }
            None => None,
        };
        println!("serving");
        let endpoint_failed = async {
            match &mut endpoint {
                Some(endpoint) => endpoint.failed().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            ended = server.run() => return ended.context("the server"),
            error = endpoint_failed => return Err(error).context("the endpoint"),
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        if let Some(endpoint) = endpoint {
            endpoint.end().await;
        }
        Ok(())
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
    if args.print_endpoint {
        let description = endpoint_file::read(&args.socket()?).context("--print-endpoint")?;
        println!("{}", serde_json::to_string_pretty(&description).context("--print-endpoint")?);
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
    runtime.block_on(settings.serve(cache))
}
