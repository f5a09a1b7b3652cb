//! A TCP proxy on loopback that can lose and delay replies.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// Faults that a proxy injects; all can be changed at any time.
#[derive(Debug, Default)]
struct Faults {
    /// Number of next replies to lose.
    to_lose: AtomicU64,
    lost: AtomicU64,
    delay_ms: AtomicU64,
    /// Additional share of replies to lose, per thousand.
    lose_per_mille: AtomicU64,
    replies: AtomicU64,
    last_lost: Mutex<String>,
}

/// Forwards TCP connections to one server, until it is dropped.
///
/// The server sends a lost reply, so it has executed the request; the client's connection is closed instead.
///
/// # Examples
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
///
/// use std::time::Duration;
/// use millpond_store_check::Proxy;
///
/// let proxy = Proxy::start("127.0.0.1:9000".into()).await.unwrap();
/// println!("a client connects to port {}", proxy.port());
/// proxy.lose(1); // the next reply
/// proxy.lose_per_mille(50);
/// proxy.delay(Duration::from_millis(20)); // each request
/// assert_eq!(proxy.lost().0, 0);
/// # });
/// ```
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    faults: Arc<Faults>,
    accepting: JoinHandle<()>,
}

impl Proxy {
    /// Listens on a free port of 127.0.0.1; must be called in a tokio runtime.
    ///
    /// # Errors
    ///
    /// If no port is available. If the server can't be reached, the proxy closes each connection.
    pub async fn start(server: String) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let port = listener.local_addr()?.port();
        let faults = Arc::new(Faults::default());
        let shared = Arc::clone(&faults);
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (server, faults) = (server.clone(), Arc::clone(&shared));
                tokio::spawn(async move {
                    if let Ok(server) = TcpStream::connect(server).await {
                        // An error ends the connection, which both sides notice.
                        let _ = forward(client, server, &faults).await;
                    }
                });
            }
        });
        Ok(Self { port, faults, accepting })
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Loses the next `count` replies; 0 stops losing.
    pub fn lose(&self, count: u64) {
        self.faults.to_lose.store(count, SeqCst);
    }

    /// Loses `share` of a thousand replies, evenly spread.
    pub fn lose_per_mille(&self, share: u64) {
        self.faults.lose_per_mille.store(share, SeqCst);
    }

    /// Delays each reply.
    pub fn delay(&self, by: Duration) {
        self.faults.delay_ms.store(u64::try_from(by.as_millis()).unwrap_or(u64::MAX), SeqCst);
    }

    /// Number of lost replies, and the first line of the last one.
    pub fn lost(&self) -> (u64, String) {
        let last = self.faults.last_lost.lock().unwrap_or_else(PoisonError::into_inner);
        (self.faults.lost.load(SeqCst), last.clone())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn forward(client: TcpStream, server: TcpStream, faults: &Faults) -> io::Result<()> {
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
        (client.into_split(), server.into_split());
    let requests = async {
        tokio::io::copy(&mut from_client, &mut to_server).await?;
        to_server.shutdown().await
    };
    let replies = async {
        let mut bytes = vec![0; 64 << 10];
        loop {
            let len = from_server.read(&mut bytes).await?;
            if len == 0 {
                return to_client.shutdown().await;
            }
            // Later parts of a reply do not start like this, unless the body contains these bytes.
            if bytes[..len].starts_with(b"HTTP/") {
                let delay_ms = faults.delay_ms.load(SeqCst);
                if delay_ms > 0 {
                    tokio::time::sleep(Duration::from_millis(delay_ms)).await;
                }
                if faults.loses_next(&bytes[..len]) {
                    return Err(io::ErrorKind::ConnectionReset.into());
                }
            }
            to_client.write_all(&bytes[..len]).await?;
        }
    };
    // A failure of either direction ends both and closes the connections.
    tokio::try_join!(requests, replies).map(drop)
}

impl Faults {
    fn loses_next(&self, reply: &[u8]) -> bool {
        let number = self.replies.fetch_add(1, SeqCst) + 1;
        let share = self.lose_per_mille.load(SeqCst);
        let loses = number * share / 1000 != (number - 1) * share / 1000
            || self.to_lose.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok();
        if loses {
            let line = reply.split(|&byte| byte == b'\r').next().unwrap_or_default();
            *self.last_lost.lock().unwrap_or_else(PoisonError::into_inner) =
                String::from_utf8_lossy(line).into_owned();
            self.lost.fetch_add(1, SeqCst);
        }
        loses
    }
}
