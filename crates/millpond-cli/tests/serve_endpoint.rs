//! Tests of the S3 endpoint of `millpond serve`: how programs find it, its key, and its writes beside other clients.
#![cfg(feature = "endpoint")]

#[path = "../../millpond-endpoint/tests/common/client.rs"]
#[allow(dead_code)]
mod client;
#[path = "common/server.rs"]
mod server;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use millpond_serve::SharedStore;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::local::LocalFileSystem;
use object_store::signer::Signer;
use object_store::{ObjectStore, ObjectStoreExt, path};
use serde_json::Value;
use server::{output, serve, start, stop};

fn described(socket: &str) -> Value {
    let printed = output(&["--print-endpoint", "--socket", socket]);
    assert!(printed.status.success(), "{printed:?}");
    serde_json::from_slice(&printed.stdout).unwrap()
}

fn text<'v>(value: &'v Value, name: &str) -> &'v str {
    value[name].as_str().unwrap_or_else(|| panic!("{name}: {value}"))
}

/// A client with the settings of a description, and nothing else.
fn s3(description: &Value, bucket: &str, connector: client::Connector) -> AmazonS3 {
    AmazonS3Builder::new()
        .with_bucket_name(bucket)
        .with_endpoint(description["url"].as_str().unwrap_or("http://localhost"))
        .with_allow_http(true)
        .with_region(text(description, "region"))
        .with_access_key_id(text(description, "access_key_id"))
        .with_secret_access_key(text(description, "secret_access_key"))
        .with_crypto_provider(Arc::new(client::PlainCrypto))
        .with_http_connector(connector)
        .build()
        .unwrap()
}

fn by_tcp(description: &Value) -> client::Connector {
    let url = text(description, "url").strip_prefix("http://").unwrap();
    client::Connector::tcp(url.parse().unwrap())
}

fn mode(path: impl AsRef<Path>) -> u32 {
    path.as_ref().metadata().unwrap().permissions().mode() & 0o777
}

/// Goal: programs find the endpoint, and read and write through it. Each client reads the last version, whichever client has
/// written it. The end of the server removes its files, but for the key.
#[test]
fn programs_use_the_cache_over_the_s3_protocol() {
    let dir = tempfile::tempdir().unwrap();
    let objects = dir.path().join("lake");
    std::fs::create_dir(&objects).unwrap();
    let socket = dir.path().join("run/socket");
    let (name, url) = (socket.display().to_string(), format!("file://{}", objects.display()));
    let s3_socket = dir.path().join("run/s3").display().to_string();
    let arguments =
        ["--store", &url, "--memory", "32M", "--freshness", "immutable", "--socket", &name];
    let of_endpoint = ["--endpoint", "--endpoint-socket", &s3_socket];
    let (child, lines) = start(&[&arguments[..], &of_endpoint].concat());
    let description = described(&name);
    let (secret, address) = (text(&description, "secret_access_key"), text(&description, "url"));
    assert!(lines.iter().any(|line| line.contains(address)), "{lines:?}");
    assert!(!lines.iter().any(|line| line.contains(secret)), "the secret is shown");
    assert_eq!(text(&description, "socket"), s3_socket);
    assert_eq!(text(&description, "bucket"), "lake");
    assert_eq!(text(&description["buckets"][0], "store"), url);
    let file = format!("{name}.endpoint.json");
    let written: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(written, description);
    let key_file = dir.path().join("run/credentials");
    assert_eq!((mode(&file), mode(&key_file), mode(&s3_socket)), (0o600, 0o600, 0o600));

    let local: Arc<dyn ObjectStore> = Arc::new(LocalFileSystem::new_with_prefix(&objects).unwrap());
    let shared = SharedStore::new(local, &socket);
    let tcp = s3(&description, "lake", by_tcp(&description));
    let unix = s3(&description, "lake", client::Connector::unix(PathBuf::from(&s3_socket)));
    let writers: [&dyn ObjectStore; 3] = [&shared, &tcp, &unix];
    let path = path::Path::from("pond/water");
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        for round in 0..6 {
            let text = format!("version {round}");
            writers[round % 3].put(&path, text.clone().into()).await.unwrap();
            for reader in writers {
                for _ in 0..2 {
                    assert_eq!(reader.get(&path).await.unwrap().bytes().await.unwrap(), text);
                }
            }
        }
        // A hit of the program's own mapping is no request, and still the last version.
        assert!(shared.stats().hits > 0, "{:?}", shared.stats());
        tcp.delete(&path).await.unwrap();
        for reader in writers {
            let gone = reader.get(&path).await.unwrap_err();
            assert!(matches!(gone, object_store::Error::NotFound { .. }), "{gone}");
        }
    });
    stop(child, "-TERM");
    let left: Vec<_> = std::fs::read_dir(dir.path().join("run")).unwrap().collect();
    assert_eq!(left.len(), 1, "the key alone: {left:?}");
    assert!(key_file.exists());
}

/// Incident: copies in a local store were hard links. A write to one file changed both, both had one ETag, and a second copy left
/// a file that kept the folder from being removed.
#[test]
fn copies_of_local_objects_are_files_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let objects = dir.path().join("lake");
    std::fs::create_dir(&objects).unwrap();
    let socket = dir.path().join("run/socket").display().to_string();
    let url = format!("file://{}", objects.display());
    let arguments = ["--store", &url, "--memory", "32M", "--socket", &socket, "--endpoint"];
    let (child, _) = start(&arguments);
    let description = described(&socket);
    let s3 = s3(&description, "lake", by_tcp(&description));
    let [from, to] = ["pond", "below/copy"].map(path::Path::from);
    let file = objects.join("below/copy");
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        s3.put(&from, "water".into()).await.unwrap();
        for _ in 0..2 {
            s3.copy(&from, &to).await.unwrap();
        }
        let names = std::fs::read_dir(file.parent().unwrap()).unwrap();
        let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["copy"]);
        let [source, copy] = [s3.head(&from).await.unwrap(), s3.head(&to).await.unwrap()];
        assert_ne!(source.e_tag, copy.e_tag);
        std::fs::OpenOptions::new().write(true).open(&file).unwrap().write_all(b"W").unwrap();
        assert_eq!(s3.get(&to).await.unwrap().bytes().await.unwrap(), "Water");
        assert_eq!(s3.get(&from).await.unwrap().bytes().await.unwrap(), "water");
        s3.delete(&to).await.unwrap();
    });
    assert!(!objects.join("below").exists(), "a folder ends with its last object");
    stop(child, "-TERM");
}

/// Goal: a server that was killed leaves a description that no program takes for a running endpoint, and that the next server
/// removes, whether it has an endpoint or not.
#[test]
fn the_description_of_a_killed_server_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/socket").display().to_string();
    let arguments = ["--store", "memory:///", "--memory", "16M", "--socket", &socket];
    let with = [&arguments[..], &["--endpoint", "0"]].concat();
    let (mut child, _) = start(&with);
    let first = described(&socket);
    child.kill().unwrap();
    child.wait().unwrap();
    let file = dir.path().join("run/socket.endpoint.json");
    assert!(file.exists());
    let refused = output(&["--print-endpoint", "--socket", &socket]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("was killed"), "{refused:?}");
    let (child, _) = start(&with);
    let second = described(&socket);
    assert_eq!(second["secret_access_key"], first["secret_access_key"], "the key stays");
    stop(child, "-INT");
    std::fs::write(&file, "{}").unwrap();
    let (child, _) = start(&arguments);
    assert!(!file.exists());
    let none = output(&["--print-endpoint", "--socket", &socket]);
    assert!(
        String::from_utf8_lossy(&none.stderr).contains("no server with an endpoint"),
        "{none:?}"
    );
    stop(child, "-TERM");
}

#[test]
fn each_wrong_setting_of_the_endpoint_has_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (socket, plain, open) = (at("run/socket"), at("plain"), at("open"));
    std::fs::write(&plain, "").unwrap();
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, PermissionsExt::from_mode(0o755)).unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let in_open = format!("{open}/credentials");
    let arguments = ["--store", "memory:///", "--memory", "16M", "--socket", &socket];
    let of = |more: &[&str], status: i32, text: &str| {
        let output = output(&[&arguments[..], more].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{more:?}: {error}");
        assert!(error.contains(text), "{more:?}: {error}");
        assert!(!Path::new(&socket).exists(), "{more:?}: the socket is left");
        assert!(!Path::new(&format!("{socket}.endpoint.json")).exists(), "{more:?}");
    };
    of(&["--endpoint", "0.0.0.0:9000"], 2, "no loopback address");
    of(&["--endpoint", "[::]:9000"], 2, "no loopback address");
    of(&["--endpoint", "localhost:9000"], 2, "neither IP:PORT");
    of(&["--endpoint", "70000"], 2, "neither IP:PORT");
    of(&["--endpoint", &taken], 1, "can't listen");
    of(&["--endpoint-socket", &plain], 1, "no socket");
    of(&["--key-file", &plain], 2, "give --endpoint");
    of(&["--endpoint", "--key-file", &in_open], 2, "mode 755");
    std::fs::write(&in_open, "").unwrap();
    of(&["--endpoint", "--key-file", &in_open, "--check"], 2, "mode 755");
    of(&["--endpoint", "--print-endpoint"], 2, "cannot be used with");
    let other = at("memory");
    std::fs::create_dir(&other).unwrap();
    let (plain_name, wrong_name) = (format!("file://{other}"), format!("UP=file://{other}"));
    of(&["--store", &plain_name, "--endpoint"], 2, "given twice; --store NAME=URL");
    of(&["--store", &plain_name, "--endpoint", "--check"], 2, "given twice; --store NAME=URL");
    of(&["--store", &wrong_name, "--endpoint"], 2, "\"UP\": a name has 3 to 63");
    of(&["--store", "memory:///"], 2, "has its objects already");
}

#[test]
fn a_check_prints_the_endpoint_and_creates_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (socket, s3_socket, key) = (at("run/socket"), at("run/s3"), at("run/key"));
    let arguments = ["--store", "memory:///", "--memory", "16M", "--socket", &socket, "--check"];
    let more = ["--endpoint", "--endpoint-socket", &s3_socket, "--key-file", &key];
    let checked = output(&[&arguments[..], &more].concat());
    assert!(checked.status.success(), "{checked:?}");
    let text = String::from_utf8_lossy(&checked.stdout);
    for part in ["http://127.0.0.1, any free port", &s3_socket, &key, "memory: memory:///"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// Goal: a server that ends keeps the next one out until its last upload has ended: the next one would not learn of its write.
#[test]
fn the_next_server_starts_after_the_last_upload() {
    let dir = tempfile::tempdir().unwrap();
    let objects = dir.path().join("lake");
    std::fs::create_dir(&objects).unwrap();
    let socket = dir.path().join("run/socket").display().to_string();
    let url = format!("file://{}", objects.display());
    let arguments = ["--store", &url, "--memory", "16M", "--socket", &socket, "--endpoint"];
    let (mut first, _) = start(&arguments);
    let description = described(&socket);
    let address = text(&description, "url").strip_prefix("http://").unwrap().to_owned();
    let client = s3(&description, "lake", by_tcp(&description));
    let (path, time) = (path::Path::from("pond"), Duration::from_secs(100));
    let url = tokio::runtime::Runtime::new().unwrap().block_on(async {
        client.signed_url(hyper::Method::PUT, &path, time).await.unwrap().to_string()
    });
    let target = url.split_once(&address).unwrap().1;
    let mut upload = TcpStream::connect(&address).unwrap();
    let head = format!("PUT {target} HTTP/1.1\r\nhost: {address}\r\ncontent-length: 10\r\n");
    write!(upload, "{head}expect: 100-continue\r\n\r\n").unwrap();
    let mut reply = [0; 25];
    upload.read_exact(&mut reply).unwrap();
    assert_eq!(reply, *b"HTTP/1.1 100 Continue\r\n\r\n");
    let id = first.id().to_string();
    assert!(std::process::Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    while TcpStream::connect(&address).is_ok() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut second =
        serve(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(second.stdout.take().unwrap()).lines().map(Result::unwrap);
    let serves = lines.take_while(|line| line != "serving").count();
    second.kill().unwrap();
    let refused = second.wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(error.contains("listens at"), "{serves} lines, then: {error}");
    upload.write_all(b"0123456789").unwrap();
    let mut reply = String::new();
    upload.read_to_string(&mut reply).unwrap();
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    assert!(first.wait().unwrap().success());
    assert_eq!(std::fs::read(objects.join("pond")).unwrap(), b"0123456789");
    let (third, _) = start(&arguments);
    stop(third, "-TERM");
}

/// Goal: each store is a bucket, by its own names, and clients of the socket see the writes to it.
#[test]
fn each_store_is_a_bucket() {
    let dir = tempfile::tempdir().unwrap();
    let stores = ["one", "two"].map(|name| dir.path().join(name));
    stores.iter().for_each(|store| std::fs::create_dir(store).unwrap());
    let urls = stores.each_ref().map(|store| format!("file://{}", store.display()));
    let socket = dir.path().join("run/socket").display().to_string();
    let named = format!("second={}", urls[1]);
    let arguments =
        ["--store", &urls[0], "--store", &named, "--memory", "32M", "--socket", &socket];
    let (child, lines) =
        start(&[&arguments[..], &["--freshness", "immutable", "--endpoint"]].concat());
    assert!(
        lines.iter().any(|line| line.contains("bucket") && line.contains("second")),
        "{lines:?}"
    );
    let description = described(&socket);
    let names: Vec<_> = description["buckets"].as_array().unwrap().iter().collect();
    assert_eq!(names.iter().map(|name| text(name, "name")).collect::<Vec<_>>(), ["one", "second"]);
    assert_eq!(text(&description, "bucket"), "one");
    let clients = ["one", "second"].map(|name| s3(&description, name, by_tcp(&description)));
    let shared = stores.each_ref().map(|store| {
        let local = LocalFileSystem::new_with_prefix(store).unwrap();
        SharedStore::new(Arc::new(local) as Arc<dyn ObjectStore>, &socket)
    });
    let path = path::Path::from("a/pond");
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        for round in 0..3 {
            for number in [0, 1] {
                let text = format!("store {number}, round {round}");
                clients[number].put(&path, text.clone().into()).await.unwrap();
                let file = std::fs::read_to_string(stores[number].join("a/pond")).unwrap();
                assert_eq!(file, text);
                for _ in 0..2 {
                    let read = shared[number].get_range(&path, 0..text.len() as u64).await.unwrap();
                    assert_eq!(read, text);
                    let read = clients[number].get(&path).await.unwrap().bytes().await.unwrap();
                    assert_eq!(read, text);
                }
            }
        }
        for client in &clients {
            let listed = client.list_with_delimiter(None).await.unwrap();
            assert_eq!(listed.common_prefixes, [path::Path::from("a")]);
        }
        for client in &shared {
            let stats = client.stats();
            assert!(stats.hits >= 3 && stats.fallbacks == 0, "{stats:?}");
        }
    });
    stop(child, "-TERM");
}

/// Goal: `millpond top` shows the clients of a server and the requests to its endpoint.
#[test]
fn statistics_have_the_server_and_its_endpoint() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/socket").display().to_string();
    let arguments = ["--store", "memory:///", "--memory", "16M", "--socket", &socket];
    let (child, _) = start(&[&arguments[..], &["--endpoint", "--stats"]].concat());
    let client = s3(&described(&socket), "memory", by_tcp(&described(&socket)));
    let memory: Arc<dyn ObjectStore> = Arc::new(object_store::memory::InMemory::new());
    let shared = SharedStore::new(memory, &socket);
    let path = path::Path::from("pond");
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        assert!(shared.attach().await);
        client.get(&path).await.unwrap_err();
        client.put(&path, "water".into()).await.unwrap();
        client.get(&path).await.unwrap().bytes().await.unwrap();
    });
    let top = || {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_millpond"));
        let output = command.args(["top", "--json", &child.id().to_string()]).output().unwrap();
        serde_json::from_slice::<Value>(&output.stdout)
            .map_or(Value::Null, |shown| shown["engines"][0]["values"].clone())
    };
    let expected = [
        ("serve_clients", 1),
        ("serve_attached", 1),
        ("endpoint_get_2xx", 1),
        ("endpoint_get_4xx", 1),
        ("endpoint_put_2xx", 1),
        ("objects_count", 1),
    ];
    let started = std::time::Instant::now();
    loop {
        let values = top();
        if expected.iter().all(|(name, value)| values[*name] == *value) {
            break;
        }
        assert!(started.elapsed().as_secs() < 60, "{values}");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    stop(child, "-TERM");
}
