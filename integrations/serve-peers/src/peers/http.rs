//! Caches with an HTTP interface, on a connection that stays open: nginx with slices, and cachey.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use super::{LENGTHS, Peer, first_word, timed};
use crate::process::{Done, Running, await_true, family};

trait Stream: Read + Write {}
impl<S: Read + Write> Stream for S {}

pub struct Http {
    name: String,
    connection: Box<dyn Stream>,
    /// The path, and further headers.
    target: String,
    headers: String,
    servers: Vec<Running>,
    buffer: Vec<u8>,
}

impl Http {
    fn get(&mut self, at: u64, len: usize) -> Done<u64> {
        let (target, headers, end) = (&self.target, &self.headers, at + len as u64 - 1);
        let request = format!(
            "GET {target} HTTP/1.1\r\nHost: cache\r\nRange: bytes={at}-{end}\r\n{headers}\r\n"
        );
        self.connection.write_all(request.as_bytes())?;
        let mut filled = 0;
        let (head_len, status_ok) = loop {
            let read = self.connection.read(&mut self.buffer[filled..])?;
            if read == 0 {
                return Err(format!("{}: the connection ended", self.name).into());
            }
            filled += read;
            let head = self.buffer[..filled].windows(4).position(|end| end == b"\r\n\r\n");
            if let Some(head) = head {
                break (head + 4, self.buffer.starts_with(b"HTTP/1.1 206"));
            }
        };
        let head = String::from_utf8_lossy(&self.buffer[..head_len]).to_ascii_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
        let body: usize = length.and_then(|len| len.trim().parse().ok()).unwrap_or(0);
        if !status_ok || body != len {
            return Err(format!("{}: {head}", self.name).into());
        }
        let all = head_len + body;
        while filled < all {
            let read = self.connection.read(&mut self.buffer[filled..all])?;
            if read == 0 {
                return Err(format!("{}: the connection ended", self.name).into());
            }
            filled += read;
        }
        Ok(first_word(&self.buffer[head_len..]))
    }
}

impl Peer for Http {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn read_all(&mut self, places: &[u64], len: usize, times: &mut Vec<u32>) -> Done<()> {
        timed(places, times, |at| self.get(at, len))
    }

    fn processes(&self) -> Vec<u32> {
        self.servers.iter().flat_map(|server| family(server.id())).collect()
    }
}

pub fn free_port() -> Done<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// An nginx that serves `files` on a port, and one that caches it in slices of 1 MiB on a Unix socket. Returns the port.
pub fn start_nginx(dir: &Path, files: &Path) -> Done<(Running, u16)> {
    let port = free_port()?;
    let (at, files) = (dir.display(), files.display());
    let config = format!(
        "daemon off; worker_processes 1; pid {at}/nginx.pid; error_log {at}/nginx.log;\n\
         events {{ worker_connections 256; }}\n\
         http {{\n\
         access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000000; keepalive_timeout 3600;\n\
         open_file_cache max=1000 inactive=3600s; open_file_cache_valid 3600s;\n\
         client_body_temp_path {at}/body; proxy_temp_path {at}/temp; fastcgi_temp_path {at}/f; uwsgi_temp_path {at}/u;\n\
         scgi_temp_path {at}/s;\n\
         proxy_cache_path {at}/cache keys_zone=slices:16m max_size=1g inactive=1h;\n\
         server {{ listen 127.0.0.1:{port}; root {files}; autoindex on; }}\n\
         server {{ listen unix:{at}/nginx.sock; location / {{\n\
         slice 1m; proxy_cache slices; proxy_cache_key $uri$slice_range; proxy_set_header Range $slice_range;\n\
         proxy_cache_valid 200 206 1h; proxy_http_version 1.1; proxy_pass http://127.0.0.1:{port}; }} }}\n\
         }}\n"
    );
    // nginx runs its workers as another user, if root starts it.
    let config = format!("user root;\n{config}");
    fs::write(dir.join("nginx.conf"), config)?;
    let mut command = Command::new("nginx");
    command.arg("-p").arg(dir).arg("-c").arg(dir.join("nginx.conf"));
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let server = Running::start(&mut command).map_err(|error| format!("nginx: {error}"))?;
    await_true("nginx", || UnixStream::connect(dir.join("nginx.sock")).is_ok())?;
    Ok((server, port))
}

pub fn nginx(dir: &Path, server: Running) -> Done<Http> {
    Ok(Http {
        name: "nginx, slices of 1 MiB".into(),
        connection: Box::new(UnixStream::connect(dir.join("nginx.sock"))?),
        target: "/measured/0".into(),
        headers: String::new(),
        servers: vec![server],
        buffer: vec![0; (1 << 20) + (16 << 10)],
    })
}

/// cachey before a versitygw that serves the bucket `files/..`.
pub fn cachey(dir: &Path, files: &Path) -> Done<Http> {
    let program = std::env::var("CACHEY").map_err(|_| "CACHEY does not name its program")?;
    let gateway =
        std::env::var("VERSITYGW").map_err(|_| "VERSITYGW does not name a store for it")?;
    let (store_port, port) = (free_port()?, free_port()?);
    let mut servers = Vec::new();
    let mut command = Command::new(gateway);
    command.args(["--port", &format!("127.0.0.1:{store_port}"), "--access", "key"]);
    command.args(["--secret", "secretsecret", "--quiet", "posix"]).arg(files);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    servers.push(Running::start(&mut command)?);
    await_true("versitygw", || TcpStream::connect(("127.0.0.1", store_port)).is_ok())?;
    let mut command = Command::new(program);
    command.args(["--memory", "512MiB", "--port", &port.to_string()]).current_dir(dir);
    command.env("AWS_ACCESS_KEY_ID", "key").env("AWS_SECRET_ACCESS_KEY", "secretsecret");
    command.env("AWS_REGION", "us-east-1");
    command.env("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{store_port}"));
    command.stdout(Stdio::null()).stderr(Stdio::null());
    servers.push(Running::start(&mut command)?);
    await_true("cachey", || TcpStream::connect(("127.0.0.1", port)).is_ok())?;
    // Only cachey's processor time counts.
    servers.reverse();
    let connection = TcpStream::connect(("127.0.0.1", port))?;
    connection.set_nodelay(true)?;
    let mut own = Http {
        name: "cachey 0.13".into(),
        connection: Box::new(connection),
        target: "/fetch/measured/0".into(),
        headers: "C0-Config: fps=true\r\n".into(),
        servers,
        buffer: vec![0; (1 << 20) + (16 << 10)],
    };
    for len in LENGTHS {
        own.get(0, len)?;
    }
    Ok(own)
}
