//! A client on a bare socket: it shows what is on the wire, and can leave at any point.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Nothing in these tests takes nearly as long.
const DEADLINE: Duration = Duration::from_secs(20);

/// Fails the test when `future` does not end in time.
pub async fn within<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(DEADLINE, future).await.expect("ends in time")
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }

    /// The `data:` payloads of a stream.
    pub fn events(&self) -> Vec<&str> {
        self.body.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect()
    }
}

pub struct Client {
    pub socket: TcpStream,
    buffer: Vec<u8>,
}

impl Client {
    pub async fn connect(address: SocketAddr) -> Client {
        Client { socket: within(TcpStream::connect(address)).await.expect("connects"), buffer: Vec::new() }
    }

    /// Sends a JSON POST.
    pub async fn post(&mut self, path: &str, headers: &[(&str, &str)], body: &str) {
        let mut all = vec![("content-type", "application/json")];
        all.extend_from_slice(headers);
        self.send("POST", path, &all, body).await;
    }

    pub async fn send(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) {
        let mut text = format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n", body.len());
        for (name, value) in headers {
            text.extend([name, ": ", value, "\r\n"]);
        }
        text += "\r\n";
        text += body;
        within(self.socket.write_all(text.as_bytes())).await.expect("writes");
    }

    /// Reads an answer's status and head.
    pub async fn head(&mut self) -> (u16, String) {
        let end = self.find(b"\r\n\r\n").await.expect("a head");
        let head = String::from_utf8(self.buffer.drain(..end + 4).collect()).expect("text");
        let status = head.split(' ').nth(1).expect("a status").parse().expect("a number");
        (status, head)
    }

    /// Reads one HTTP chunk; `None` after the last, or when the connection ended early.
    pub async fn chunk(&mut self) -> Option<String> {
        let end = self.find(b"\r\n").await?;
        let line = String::from_utf8(self.buffer.drain(..end + 2).collect()).expect("text");
        let size = usize::from_str_radix(line.trim(), 16).expect("a chunk size");
        let data = self.take(size + 2).await?;
        (size > 0).then(|| String::from_utf8_lossy(&data[..size]).into_owned())
    }

    /// Reads a whole answer; a cut one has the part of the body that came.
    pub async fn answer(&mut self) -> Answer {
        let (status, head) = self.head().await;
        let mut body = String::new();
        if head.contains("transfer-encoding: chunked") {
            while let Some(chunk) = self.chunk().await {
                body += &chunk;
            }
        } else {
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap_or("0");
            let length: usize = length.parse().expect("a length");
            match self.take(length).await {
                Some(whole) => body = String::from_utf8_lossy(&whole).into_owned(),
                None => body = String::from_utf8_lossy(&self.buffer).into_owned(),
            }
        }
        Answer { status, head, body }
    }

    /// Whether the peer closed: `Ok` in order, `Err` by reset.
    pub async fn closed(&mut self) -> std::io::Result<()> {
        let mut rest = Vec::new();
        within(self.socket.read_to_end(&mut rest)).await.map(|_| ())
    }

    async fn find(&mut self, needle: &[u8]) -> Option<usize> {
        loop {
            if let Some(at) = self.buffer.windows(needle.len()).position(|window| window == needle) {
                return Some(at);
            }
            self.fill().await?;
        }
    }

    async fn take(&mut self, count: usize) -> Option<Vec<u8>> {
        while self.buffer.len() < count {
            self.fill().await?;
        }
        Some(self.buffer.drain(..count).collect())
    }

    async fn fill(&mut self) -> Option<()> {
        let mut more = [0; 4096];
        let count = within(self.socket.read(&mut more)).await.unwrap_or(0);
        self.buffer.extend_from_slice(&more[..count]);
        (count > 0).then_some(())
    }
}

/// One JSON POST on a connection of its own.
pub async fn post(address: SocketAddr, path: &str, body: &str) -> Answer {
    let mut client = Client::connect(address).await;
    client.post(path, &[], body).await;
    client.answer().await
}

/// One GET on a connection of its own.
pub async fn get(address: SocketAddr, path: &str) -> Answer {
    let mut client = Client::connect(address).await;
    client.send("GET", path, &[], "").await;
    client.answer().await
}

/// The keys of a JSON text in the order in which they are written.
pub fn keys(text: &str) -> Vec<String> {
    let mut keys = Vec::new();
    let mut rest = text;
    while let Some(start) = rest.find('"') {
        let mut end = start + 1;
        let bytes = rest.as_bytes();
        while bytes[end] != b'"' {
            end += if bytes[end] == b'\\' { 2 } else { 1 };
        }
        if bytes.get(end + 1) == Some(&b':') {
            keys.push(rest[start + 1..end].to_owned());
        }
        rest = &rest[end + 1..];
    }
    keys
}
