//! Accepts connections and serves each in a task of its own.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use s3s::service::S3Service;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::task::JoinSet;

use crate::connections::{CLOSE_AGE_MIN, Connections, OpenConnection};
use crate::counts::RequestCounts;
use crate::filter::Filter;
use crate::listeners::UnixSocket;
use crate::stalls::PacedOutput;
use crate::uploads::Uploads;
use crate::{Error, Limits};

/// Pause after an accept failed for lack of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How often uploads are examined for their age.
const UPLOAD_CHECK: Duration = Duration::from_secs(60);

trait Accept {
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    async fn accept(&self) -> io::Result<Self::Stream>;
}

impl Accept for TcpListener {
    type Stream = tokio::net::TcpStream;

    async fn accept(&self) -> io::Result<Self::Stream> {
        let (stream, _) = self.accept().await?;
        // Otherwise the last segment of a response waits for an acknowledgement. An error of the socket shows at the first
        // read.
        let _ = stream.set_nodelay(true);
        Ok(stream)
    }
}

impl Accept for UnixListener {
    type Stream = tokio::net::UnixStream;

    async fn accept(&self) -> io::Result<Self::Stream> {
        Ok(self.accept().await?.0)
    }
}

/// State that the connections of all listeners share.
struct Shared {
    service: S3Service,
    limits: Limits,
    counts: RequestCounts,
    graceful: GracefulShutdown,
}

/// Bound listeners, and what serves their connections.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) service: S3Service,
    pub(crate) uploads: Arc<Uploads>,
    pub(crate) limits: Limits,
    pub(crate) counts: RequestCounts,
    pub(crate) tcp: Option<(std::net::TcpListener, SocketAddr)>,
    pub(crate) unix: Option<UnixSocket>,
}

impl Server {
    pub(crate) async fn run(self, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
        let Self { service, uploads, limits, counts, tcp, unix } = self;
        let failed = |on: String| move |source| Error::Listen { on, source };
        let grace = limits.shutdown_grace;
        let shared = Shared { service, limits, counts, graceful: GracefulShutdown::new() };
        let tcp = match tcp {
            None => None,
            Some((listener, address)) => {
                Some(TcpListener::from_std(listener).map_err(failed(address.to_string()))?)
            }
        };
        // Holds the path of the socket until the end.
        let mut path = None;
        let local = match unix {
            None => None,
            Some(socket) => {
                let on = socket.path().display().to_string();
                let listener = socket.listener.try_clone().map_err(failed(on.clone()))?;
                path = Some(socket);
                Some(UnixListener::from_std(listener).map_err(failed(on))?)
            }
        };
        // The connections. Those that outlast the grace are aborted by the drop.
        let (mut by_tcp, mut by_path) = (JoinSet::new(), JoinSet::new());
        {
            let unsigned = shared.limits.unsigned_connections;
            let accepting = async {
                tokio::join!(
                    accept_all(tcp, &shared, unsigned, &mut by_tcp),
                    // Its socket has mode 0600: all its connections are of the endpoint's user.
                    accept_all(local, &shared, shared.limits.connections, &mut by_path),
                    drop_old(&uploads)
                );
            };
            let (accepting, shutdown) = (pin!(accepting), pin!(shutdown));
            futures_util::future::select(accepting, shutdown).await;
        }
        drop(path);
        let _ = tokio::time::timeout(grace, shared.graceful.shutdown()).await;
        Ok(())
    }
}

async fn drop_old(uploads: &Uploads) {
    loop {
        uploads.wait_for_one().await;
        tokio::time::sleep(UPLOAD_CHECK).await;
        uploads.drop_old();
    }
}

/// `unsigned`: the most connections without a valid signature so far.
async fn accept_all<L: Accept>(
    listener: Option<L>,
    shared: &Shared,
    unsigned: usize,
    tasks: &mut JoinSet<()>,
) {
    let Some(listener) = listener else { return std::future::pending().await };
    let connections = Connections::new(shared.limits.connections, unsigned, CLOSE_AGE_MIN);
    loop {
        while tasks.try_join_next().is_some() {}
        match listener.accept().await {
            Ok(stream) => {
                let open = connections.open().await;
                let watcher = shared.graceful.watcher();
                tasks.spawn(connection(
                    stream,
                    open,
                    watcher,
                    (shared.service.clone(), shared.counts.clone()),
                    shared.limits.clone(),
                ));
            }
            // A client that went away before the accept.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

async fn connection<S>(
    stream: S,
    open: OpenConnection,
    watcher: Watcher,
    (service, counts): (S3Service, RequestCounts),
    limits: Limits,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let filter = Filter {
        service,
        counts,
        connection: Arc::clone(&open.state),
        body_pause_max: limits.body_pause_max,
    };
    let stream = TokioIo::new(PacedOutput::new(stream, limits.output_pause_max));
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.idle_max)
        .max_buf_size(limits.head_bytes_max)
        .serve_connection(stream, filter);
    let serving = pin!(watcher.watch(serving));
    let unsigned = async {
        tokio::time::sleep(limits.unsigned_age_max).await;
        if open.state.is_signed() {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        // An error concerns this client alone, which sees it as the end of its connection.
        _ = serving => {}
        () = open.state.closed() => {}
        () = unsigned => {}
    }
}
