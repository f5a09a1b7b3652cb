//! Single requests with a chosen method, query and headers.

use hmac::{Hmac, KeyInit, Mac};
use http::{HeaderMap, Method, StatusCode};
use object_store::client::{HttpRequestBody, HttpService};
use sha2::{Digest, Sha256};

use super::client::Connector;
use super::{BUCKET, Running};

#[derive(Debug)]
pub struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: String,
}

impl Reply {
    /// The code of an error.
    pub fn code(&self) -> &str {
        let after = self.body.split_once("<Code>").map_or("", |(_, after)| after);
        after.split_once("</Code>").map_or("", |(code, _)| code)
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub struct Request<'a> {
    running: &'a Running,
    method: Method,
    uri: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    pub key: (String, String),
    pub sha256: Option<String>,
    pub seconds: i64,
}

impl Running {
    /// A request of an object, or of a list (`?list-type=2`).
    pub fn request(&self, method: Method, key: &str) -> Request<'_> {
        self.request_at(
            method,
            &format!("/{BUCKET}{}{key}", if key.starts_with('?') { "" } else { "/" }),
        )
    }

    pub fn request_at(&self, method: Method, path: &str) -> Request<'_> {
        Request {
            running: self,
            method,
            uri: format!("http://{}{path}", self.address),
            headers: Vec::new(),
            body: Vec::new(),
            key: self.key.clone(),
            sha256: None,
            seconds: 0,
        }
    }
}

impl Request<'_> {
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    pub fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = body.into();
        self
    }

    fn built(&self) -> http::Request<HttpRequestBody> {
        let mut request = http::Request::builder().method(self.method.clone()).uri(&self.uri);
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        request.body(HttpRequestBody::from(self.body.clone())).unwrap()
    }

    /// Sends it without a signature.
    pub async fn unsigned(self) -> Reply {
        let request = self.built();
        self.reply(request).await
    }

    /// The signed head of a request whose body is sent by the test.
    pub fn head(&self) -> String {
        let request = self.signed();
        let target = request.uri().path_and_query().unwrap();
        let mut head = format!("{} {target} HTTP/1.1\r\n", self.method);
        for (name, value) in request.headers() {
            head += &format!("{name}: {}\r\n", value.to_str().unwrap());
        }
        format!("{head}content-length: {}\r\n\r\n", self.body.len())
    }

    pub async fn send(self) -> Reply {
        let request = self.signed();
        self.reply(request).await
    }

    /// Signs as version 4 says; `sha256` replaces the hash of the body, `seconds` moves the date.
    fn signed(&self) -> http::Request<HttpRequestBody> {
        let mut request = self.built();
        let date = time::OffsetDateTime::now_utc() + time::Duration::seconds(self.seconds);
        let (year, month, day) = (date.year(), u8::from(date.month()), date.day());
        let day = format!("{year:04}{month:02}{day:02}");
        let date = format!("{day}T{:02}{:02}{:02}Z", date.hour(), date.minute(), date.second());
        let sha256 = self.sha256.clone().unwrap_or_else(|| hex(&Sha256::digest(&self.body)));
        let headers = request.headers_mut();
        headers.insert("host", self.running.address.to_string().parse().unwrap());
        headers.insert("x-amz-date", date.parse().unwrap());
        headers.insert("x-amz-content-sha256", sha256.parse().unwrap());
        let mut names: Vec<_> = headers.keys().map(|name| name.as_str().to_owned()).collect();
        names.sort_unstable();
        let mut canonical = format!("{}\n{}\n", self.method, request.uri().path());
        let mut query: Vec<_> = request
            .uri()
            .query()
            .unwrap_or("")
            .split('&')
            .filter(|pair| !pair.is_empty())
            .collect();
        query.sort_unstable();
        let query: Vec<_> = query
            .iter()
            .map(|pair| if pair.contains('=') { pair.to_string() } else { format!("{pair}=") })
            .collect();
        canonical += &query.join("&");
        canonical += "\n";
        for name in &names {
            let value = request.headers()[name.as_str()].to_str().unwrap().trim();
            canonical += &format!("{name}:{value}\n");
        }
        let names = names.join(";");
        canonical += &format!("\n{names}\n{sha256}");
        let scope = format!("{day}/us-east-1/s3/aws4_request");
        let text = format!(
            "AWS4-HMAC-SHA256\n{date}\n{scope}\n{}",
            hex(&Sha256::digest(canonical.as_bytes()))
        );
        let mut secret = format!("AWS4{}", self.key.1).into_bytes();
        for part in [&day, "us-east-1", "s3", "aws4_request", &text] {
            let mut hmac = Hmac::<Sha256>::new_from_slice(&secret).unwrap();
            hmac.update(part.as_bytes());
            secret = hmac.finalize().into_bytes().to_vec();
        }
        let (id, signature) = (&self.key.0, hex(&secret));
        let authorization = format!(
            "AWS4-HMAC-SHA256 Credential={id}/{scope}, SignedHeaders={names}, Signature={signature}"
        );
        request.headers_mut().insert("authorization", authorization.parse().unwrap());
        request
    }

    async fn reply(&self, request: http::Request<HttpRequestBody>) -> Reply {
        let response = Connector::tcp(self.running.address).call(request).await.unwrap();
        let (head, body) = response.into_parts();
        let body = String::from_utf8_lossy(&body.bytes().await.unwrap()).into_owned();
        Reply { status: head.status, headers: head.headers, body }
    }
}
