//! `millpond serve`: one cache of object stores for all processes of a user.
//!
//! - [`stores`]: opens the stores.
//! - [`endpoint`], [`running_endpoint`]: the S3 endpoint over the same cache; [`endpoint_file`]: how programs find it.
//! - [`published_counts`]: statistics for `millpond top`. [`log`]: its warnings.

#[cfg_attr(not(feature = "endpoint"), expect(dead_code, reason = "for the endpoint"))]
mod endpoint;
#[cfg_attr(not(feature = "endpoint"), expect(dead_code, reason = "for the endpoint"))]
mod endpoint_file;
mod log;
mod published_counts;
#[cfg(feature = "endpoint")]
mod running_endpoint;
#[cfg(not(feature = "endpoint"))]
#[path = "no_endpoint.rs"]
mod running_endpoint;
#[cfg_attr(not(feature = "endpoint"), expect(dead_code, reason = "for the endpoint"))]
mod stores;

use std::fmt::Display;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use millpond_objects::{CachedStore, Freshness};
use millpond_serve::{
    InheritedSocket, MemoryChoice, Server, StoreSet, default_socket, inherited_socket,
    set_server_memory,
};
use object_store::ObjectStore;
use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::filter::Targets;

use self::endpoint::EndpointSettings;
use self::endpoint_file::EndpointFile;
use self::published_counts::PublishedCounts;
use self::running_endpoint::RunningEndpoint;
use self::stores::OpenedStore;
use crate::descriptors;
use crate::failure::{Context, Failure, REFUSED, Result};
use crate::run::parse_size;
use crate::standard_output::print_line;

/// Serves one cache of object stores to all processes of this user
///
/// Programs read it by `millpond_serve::SharedStore`: cached bytes without a system call, others by this
/// server. With --endpoint, programs in any language use it over the S3 protocol. Runs until SIGTERM or
/// SIGINT. The environment has the keys for S3: AWS_ACCESS_KEY_ID,
/// AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT. Warnings go to standard error. Exit status: 2 for settings that can't be used, 1 if
/// the server can't run.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "Files:
  millpond/serve.sock in XDG_RUNTIME_DIR: the socket, SOCKET below; for root without XDG_RUNTIME_DIR in /run
  SOCKET.endpoint.json: how programs reach the endpoint, with its key; mode 600
  credentials, beside the socket: the access key of the endpoint, an AWS credentials file
  millpond/serve.env in XDG_CONFIG_HOME: options of the systemd service, as MILLPOND_SERVE=..., and keys

Example:
  millpond serve --store s3://lake --store s3://logs/2026 --memory 8G --endpoint 9000")]
pub struct ServeArgs {
    /// The path of the socket [default: millpond/serve.sock in XDG_RUNTIME_DIR; for root without it /run/millpond/serve.sock]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// A store: s3://BUCKET, s3://BUCKET/PREFIX, file:///DIR or memory:///. Several stores share the cache: give
    /// the option for each. NAME=URL names the bucket of the endpoint, which by default is BUCKET or the last part
    /// of DIR
    #[arg(long, value_name = "URL", required_unless_present_any = ["set_memory", "print_endpoint"])]
    store: Vec<String>,

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

    /// The level of the log on standard error: off, error, warn, info, debug or trace, or a list with levels of modules, such as
    /// warn,millpond_serve=debug [default: MILLPOND_LOG, or warn]
    #[arg(long, value_name = "LEVEL", value_parser = log::parse_filter)]
    log: Option<Targets>,

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
    stores: Vec<OpenedStore>,
    /// The same, behind the cache.
    set: StoreSet,
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
    /// The path of the socket. `inherited`: that of the service manager's.
    fn socket(&self, inherited: Option<&Path>) -> Result<PathBuf> {
        if let Some(path) = inherited {
            return match &self.socket {
                Some(other) if other != path => Err(refused(format!(
                    "--socket {}: the service manager listens at {}",
                    other.display(),
                    path.display()
                ))),
                _ => Ok(path.to_owned()),
            };
        }
        self.socket.clone().or_else(default_socket).ok_or_else(|| {
            refused(
                "XDG_RUNTIME_DIR is not set to an absolute path: set it to a directory of yours with mode 700, or give \
                 --socket PATH",
            )
        })
    }

    fn settings(&self, inherited: Option<&Path>) -> Result<Settings> {
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
        let stores = stores::open_all(&self.store)?;
        let socket = self.socket(inherited)?;
        let endpoint = EndpointSettings::new(
            (self.endpoint, self.endpoint_socket.as_deref()),
            self.key_file.as_deref(),
            socket.parent().unwrap_or(Path::new("")),
        )?;
        Ok(Settings {
            set: stores::set_of(&stores)?,
            stores,
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
    fn cache(&self, opens_disk: bool, counts: &Arc<PublishedCounts>) -> Result<CachedStore> {
        let counts = Arc::clone(counts);
        let mut builder = CachedStore::builder(Arc::new(self.set.clone()))
            .memory_bytes(self.memory_bytes)
            .page_bytes(self.page_bytes)
            .freshness(self.freshness)
            .shared(self.shared_memory.clone())
            .published(opens_disk && self.is_published)
            .more_lines(move || counts.lines());
        if opens_disk && let Some((dir, bytes)) = &self.disk {
            builder = builder.disk(dir, *bytes);
        }
        builder.build().map_err(|error| refused(error.to_string()))
    }

    /// Each store, by way of the cache.
    fn views(&self, cache: &CachedStore) -> Vec<(&OpenedStore, Arc<dyn ObjectStore>)> {
        let view = |(number, opened)| (opened, self.set.view(number, Arc::new(cache.clone())));
        self.stores.iter().enumerate().map(view).collect()
    }

    /// The lines about the server without its endpoint.
    fn text(&self, cache: &CachedStore) -> String {
        let shared = cache.shared_cache().expect("built as shared");
        let mut lines = vec![format!("socket:        {}", self.socket.display())];
        let stores = self.stores.iter();
        lines.extend(
            stores.map(|opened| format!("store:         {} ({})", opened.url, opened.store)),
        );
        lines.push(format!("memory:        {}", human(self.memory_bytes)));
        lines.push(match &self.disk {
            Some((dir, bytes)) => format!("disk:          {}, {}", dir.display(), human(*bytes)),
            None => "disk:          none".into(),
        });
        lines.push(match self.freshness.max_age() {
            None => "freshness:     immutable".into(),
            Some(Duration::ZERO) => "freshness:     revalidate".into(),
            Some(age) => format!("freshness:     {age:?}"),
        });
        lines.push(format!("page:          {} bytes", self.page_bytes));
        lines.push(format!("shared memory: {}", shared.memory()));
        let advice = shared.memory().advice();
        lines.extend(advice.map(|command| {
            format!("               with huge pages hits would be faster; as root: {command}")
        }));
        lines.join("\n")
    }
}

/// Prints lines of a server, which serves even if there is no place for them.
fn print_status(text: impl Display) {
    let _ = print_line(text);
}

/// Notifies the service manager, if one has started the server.
fn notify_manager(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        let _ = writeln!(io::stderr(), "millpond: the service manager can't be notified: {error}");
    }
}

impl Settings {
    async fn serve(
        &self,
        cache: CachedStore,
        inherited: Option<InheritedSocket>,
        counts: &PublishedCounts,
    ) -> Result<()> {
        let server = match inherited {
            Some(socket) => Server::on_inherited(cache.clone(), &self.set, socket),
            None => Server::bind_stores(cache.clone(), &self.set, &self.socket),
        };
        let server = server.context(format!("--socket {}", self.socket.display()))?;
        EndpointFile::remove_stale(&self.socket).context("the file of an earlier endpoint")?;
        let mut terminate = signal(SignalKind::terminate()).context("signals")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("signals")?;
        print_status(self.text(&cache));
        let mut endpoint = match &self.endpoint {
            Some(settings) => {
                Some(RunningEndpoint::start(settings, self.views(&cache), &self.socket)?)
            }
            None => None,
        };
        print_status("serving");
        notify_manager(NotifyState::Ready);
        counts.publish(server.handle().counts(), endpoint.as_ref());
        let endpoint_failed = async {
            match &mut endpoint {
                Some(endpoint) => endpoint.failed().await,
                None => std::future::pending().await,
            }
        };
        // Dropped last: it has the lock of the socket's path, and an upload in progress may write until the endpoint has ended.
        // A server that started before would not learn of that write.
        let mut running = pin!(server.run());
        tokio::select! {
            ended = &mut running => return ended.context("the server"),
            error = endpoint_failed => return Err(error).context("the endpoint"),
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        notify_manager(NotifyState::Stopping);
        if let Some(endpoint) = endpoint {
            tokio::select! {
                ended = &mut running => return ended.context("the server"),
                () = endpoint.end() => {}
            }
        }
        Ok(())
    }
}

pub fn run(args: &ServeArgs) -> Result<()> {
    if let Some(bytes) = args.set_memory {
        let socket = args.socket(None)?;
        let reached = set_server_memory(&socket, bytes)
            .context(format!("--set-memory: the server at {}", socket.display()))?;
        return print_line(format_args!("the limit is {}", human(reached)));
    }
    if args.print_endpoint {
        let description = endpoint_file::read(&args.socket(None)?).context("--print-endpoint")?;
        return print_line(serde_json::to_string_pretty(&description).context("--print-endpoint")?);
    }
    let inherited = inherited_socket().map_err(|error| refused(error.to_string()))?;
    let settings = args.settings(inherited.as_ref().map(InheritedSocket::path))?;
    if args.check {
        let cache = settings.cache(false, &Arc::default())?;
        print_line(settings.text(&cache))?;
        if let Some(endpoint) = &settings.endpoint {
            print_line(RunningEndpoint::check(endpoint, &settings.views(&cache))?)?;
        }
        return Ok(());
    }
    let _log = log::start(args.log.as_ref())?;
    descriptors::use_all();
    let counts = Arc::new(PublishedCounts::default());
    let cache = settings.cache(true, &counts)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("start of the runtime")?;
    runtime.block_on(settings.serve(cache, inherited, &counts))
}
