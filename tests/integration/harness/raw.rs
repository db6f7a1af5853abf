//! A server that plays a script on each connection and keeps what it received: for peers that misbehave.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use super::{SOON, Task, eventually};

/// One thing that the server does.
#[derive(Clone, Debug)]
pub enum Step {
    /// Reads one request: head, and as many body bytes as `content-length` says (or up to the last chunk).
    ReadRequest,
    /// Sends bytes.
    Send(Vec<u8>),
    /// Waits for a permit of this gate.
    Gate(Arc<Semaphore>),
    /// Reads until the peer closes, and notes that it did.
    AwaitClose,
    /// Closes with a reset.
    Reset,
}

/// What happened on one connection.
#[derive(Clone, Debug, Default)]
pub struct Connection {
    /// Everything that was received.
    pub received: Vec<u8>,
    /// The peer closed, or reset, its side.
    pub closed_by_peer: bool,
    /// The script has ended.
    pub done: bool,
}

impl Connection {
    /// The head of the first request.
    pub fn head(&self) -> String {
        let end = find(&self.received, b"\r\n\r\n").unwrap_or(self.received.len());
        String::from_utf8_lossy(&self.received[..end]).into_owned()
    }

    /// A header of the first request; the name in lower case.
    pub fn header(&self, name: &str) -> Option<String> {
        self.head().lines().skip(1).find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
        })
    }

    /// Everything after the first head.
    pub fn body(&self) -> &[u8] {
        find(&self.received, b"\r\n\r\n").map_or(&[], |end| &self.received[end + 4..])
    }
}

/// The server. Connection `n` plays script `n`; when there are more connections, the last script is played again.
#[derive(Debug)]
pub struct RawServer {
    address: SocketAddr,
    connections: Arc<Mutex<Vec<Connection>>>,
    _task: Task,
}

impl RawServer {
    /// Starts it.
    pub async fn start(scripts: Vec<Vec<Step>>) -> RawServer {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let address = listener.local_addr().expect("address");
        let connections = Arc::new(Mutex::new(Vec::new()));
        let book = Arc::clone(&connections);
        let task = Task::spawn(async move {
            let mut running = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let index = {
                    let mut book = book.lock().expect("book");
                    book.push(Connection::default());
                    book.len() - 1
                };
                let script = scripts.get(index).or(scripts.last()).cloned().unwrap_or_default();
                running.spawn(play(stream, script, Arc::clone(&book), index));
            }
        });
        RawServer { address, connections, _task: task }
    }

    /// A server that answers each request with `answer` and closes.
    pub async fn answering(answer: impl Into<Vec<u8>>) -> RawServer {
        RawServer::start(vec![vec![Step::ReadRequest, Step::Send(answer.into())]]).await
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What happened so far.
    pub fn connections(&self) -> Vec<Connection> {
        self.connections.lock().expect("book").clone()
    }

    /// Waits until connection `index` satisfies `condition`.
    pub async fn wait_for(&self, index: usize, condition: impl Fn(&Connection) -> bool) -> Connection {
        self.wait_for_within(SOON, index, condition).await
    }

    /// The same with a limit of its own.
    pub async fn wait_for_within(
        &self,
        limit: Duration,
        index: usize,
        condition: impl Fn(&Connection) -> bool,
    ) -> Connection {
        let probe = async || self.connections().get(index).filter(|connection| condition(connection)).cloned();
        eventually(limit, "something on a raw connection", probe).await
    }
}

async fn play(mut stream: TcpStream, script: Vec<Step>, book: Arc<Mutex<Vec<Connection>>>, index: usize) {
    let note = |change: &dyn Fn(&mut Connection)| change(&mut book.lock().expect("book")[index]);
    stream.set_nodelay(true).expect("nodelay");
    // How much of what was received belongs to requests that were read before.
    let mut consumed = 0;
    for step in script {
        match step {
            Step::ReadRequest => loop {
                let end = request_end(&book.lock().expect("book")[index].received[consumed..]);
                if let Some(end) = end {
                    consumed += end;
                    break;
                }
                if !receive(&mut stream, &note).await {
                    note(&|connection| connection.done = true);
                    return;
                }
            },
            Step::Send(bytes) => {
                if stream.write_all(&bytes).await.is_err() {
                    note(&|connection| connection.closed_by_peer = true);
                }
            }
            Step::Gate(gate) => gate.acquire().await.expect("gate").forget(),
            Step::AwaitClose => while receive(&mut stream, &note).await {},
            Step::Reset => stream.set_zero_linger().expect("linger"),
        }
    }
    // Whoever sees that the script is done also sees its connection closed.
    drop(stream);
    note(&|connection| connection.done = true);
}

async fn receive(stream: &mut TcpStream, note: &(impl Fn(&dyn Fn(&mut Connection)) + Sync)) -> bool {
    let mut buffer = vec![0; 256 * 1024];
    match stream.read(&mut buffer).await {
        Ok(0) | Err(_) => {
            note(&|connection| connection.closed_by_peer = true);
            false
        }
        Ok(length) => {
            note(&|connection| connection.received.extend_from_slice(&buffer[..length]));
            true
        }
    }
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

/// The length of the first request in `bytes`, when it is complete.
pub fn request_end(bytes: &[u8]) -> Option<usize> {
    let head = find(bytes, b"\r\n\r\n")? + 4;
    let text = String::from_utf8_lossy(&bytes[..head]).to_ascii_lowercase();
    let header = |name: &str| text.lines().find_map(|line| line.strip_prefix(name).map(str::trim).map(str::to_owned));
    if let Some(length) = header("content-length:") {
        let end = head + length.parse::<usize>().expect("content-length");
        return (bytes.len() >= end).then_some(end);
    }
    if header("transfer-encoding:").is_some() {
        return find(&bytes[head..], b"0\r\n\r\n").map(|at| head + at + 5);
    }
    Some(head)
}
