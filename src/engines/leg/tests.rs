//! Dropping a call closes its connection, whatever the call is doing.

mod connections;

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use super::*;

/// Generous: only reached when something is broken.
const SOON: Duration = Duration::from_secs(20);

/// Far more than the sockets' buffers hold.
const BIG: usize = 20 << 20;

fn call(address: &str, body: Bytes) -> LegRequest {
    LegRequest {
        address: address.into(),
        path: "/v1/completions?x=1".to_owned(),
        headers: HeaderMap::new(),
        body,
        timeout: Duration::from_mins(10),
        max_answer_bytes: 1 << 20,
    }
}

async fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (listener, address)
}

/// Reads what is there, at least one byte; 0 at the peer's close or reset.
async fn read_some(socket: &mut TcpStream) -> usize {
    let mut buffer = vec![0; 64 * 1024];
    tokio::time::timeout(SOON, socket.read(&mut buffer)).await.expect("the peer sends or closes").unwrap_or(0)
}

/// Reads up to the peer's close; how much it was.
async fn read_to_close(socket: &mut TcpStream) -> usize {
    let mut total = 0;
    loop {
        match read_some(socket).await {
            0 => return total,
            length => total += length,
        }
    }
}

/// Runs the call up to `reached`, then drops it; the server's side of the connection comes back.
async fn drop_when<F>(body: Bytes, reached: impl FnOnce(TcpStream) -> F) -> TcpStream
where
    F: Future<Output = TcpStream>,
{
    let (listener, address) = listen().await;
    let client = EngineClient::new();
    tokio::select! {
        outcome = client.prefill(call(&address, body)) => panic!("the call ended: {outcome:?}"),
        socket = async { reached(listener.accept().await.unwrap().0).await } => socket,
    }
}

#[tokio::test]
async fn r24_a_call_dropped_while_the_pod_computes_closes_its_connection() {
    let mut socket = drop_when(Bytes::from_static(b"{}"), |mut socket| async {
        assert!(read_some(&mut socket).await > 0);
        socket
    })
    .await;
    read_to_close(&mut socket).await;
}

#[tokio::test]
async fn r24_a_call_dropped_while_it_sends_closes_its_connection() {
    let mut socket = drop_when(Bytes::from(vec![b' '; BIG]), |mut socket| async {
        // The rest stays in the pipe: the sender is blocked in the middle of the body.
        assert!(read_some(&mut socket).await > 0);
        socket
    })
    .await;
    assert!(read_to_close(&mut socket).await < BIG, "the body was sent to its end");
}

#[tokio::test]
async fn r24_a_call_dropped_while_it_reads_the_answer_closes_its_connection() {
    for head in ["content-length: 1000", "transfer-encoding: chunked"] {
        let mut socket = drop_when(Bytes::from_static(b"{}"), |mut socket| async move {
            assert!(read_some(&mut socket).await > 0);
            let chunk = if head.starts_with('c') { "{" } else { "1\r\n{\r\n" };
            socket.write_all(format!("HTTP/1.1 200 OK\r\n{head}\r\n\r\n{chunk}").as_bytes()).await.unwrap();
            // Not a synchronisation: the assertion holds however much of the answer was read.
            tokio::task::yield_now().await;
            socket
        })
        .await;
        read_to_close(&mut socket).await;
    }
}

/// The number of sockets of this machine that are still trying to reach `port`.
fn connecting_to(port: u16) -> usize {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    let target = format!(":{port:04X} 02");
    table.lines().filter(|line| line.contains(&target)).count()
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn r24_a_call_dropped_while_it_connects_gives_up() {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    let until = |wanted: fn(usize) -> bool| async move {
        while !wanted(connecting_to(address.port())) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let mut fillers = Vec::new();
    // Nobody accepts: once the queue is full, connecting hangs.
    while let Ok(Ok(filler)) = tokio::time::timeout(Duration::from_millis(300), TcpStream::connect(address)).await {
        fillers.push(filler);
    }
    tokio::time::timeout(SOON, until(|count| count == 0)).await.expect("the fillers are settled");
    let client = EngineClient::new();
    tokio::select! {
        outcome = client.prefill(call(&address.to_string(), Bytes::new())) => panic!("the call ended: {outcome:?}"),
        waited = tokio::time::timeout(SOON, until(|count| count > 0)) => waited.expect("the call connects"),
    }
    tokio::time::timeout(SOON, until(|count| count == 0)).await.expect("nobody connects any more");
}

#[tokio::test(start_paused = true)]
async fn the_time_limit_covers_the_whole_exchange() {
    let (listener, address) = listen().await;
    let client = EngineClient::new();
    let request = LegRequest { timeout: Duration::from_secs(3), ..call(&address, Bytes::new()) };
    let (outcome, _socket) = tokio::join!(client.prefill(request), async {
        let (mut socket, _) = listener.accept().await.unwrap();
        assert!(socket.read(&mut [0; 1024]).await.unwrap() > 0);
        socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{").await.unwrap();
        socket
    });
    let LegOutcome::Failed { class: LegFailure::Timeout, detail, sent: true } = outcome else { panic!("{outcome:?}") };
    assert_eq!(detail, "no answer within 3 s");
}

#[tokio::test]
async fn an_answer_over_the_limit_is_unusable_and_nothing_more_of_it_is_read() {
    let (listener, address) = listen().await;
    let client = EngineClient::new();
    let request = LegRequest { max_answer_bytes: 10, ..call(&address, Bytes::new()) };
    let (outcome, mut socket) = tokio::join!(client.prefill(request), async {
        let (mut socket, _) = listener.accept().await.unwrap();
        assert!(read_some(&mut socket).await > 0);
        let _ = socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n01234567890").await;
        socket
    });
    let LegOutcome::Failed { class: LegFailure::BadResponse, sent: true, .. } = outcome else { panic!("{outcome:?}") };
    read_to_close(&mut socket).await;
}

#[tokio::test]
async fn only_a_call_without_a_connection_was_certainly_not_read() {
    let client = EngineClient::new();
    let (listener, address) = listen().await;
    let (outcome, ()) = tokio::join!(client.prefill(call(&address, Bytes::from_static(b"{}"))), async {
        // It is there, and nothing of it is read: the peer cannot know that.
        let (socket, _) = listener.accept().await.unwrap();
        assert!(socket.peek(&mut [0]).await.unwrap() > 0);
        drop(socket);
    });
    let LegOutcome::Failed { class: LegFailure::Transport, sent: true, .. } = outcome else { panic!("{outcome:?}") };
    drop(listener);
    let outcome = client.prefill(call(&address, Bytes::from_static(b"{}"))).await;
    let LegOutcome::Failed { class: LegFailure::Transport, sent: false, .. } = outcome else { panic!("{outcome:?}") };
    let outcome = client.prefill(LegRequest { path: "x".to_owned(), ..call(&address, Bytes::new()) }).await;
    let LegOutcome::Failed { class: LegFailure::RequestSetup, sent: false, .. } = outcome else {
        panic!("{outcome:?}")
    };
}

/// The path of a client is forwarded as it is; nothing in it can name another host.
#[test]
fn a_path_never_changes_the_host() {
    let long = format!("/v1/completions?{}", "x".repeat(70_000));
    for (path, expected) in [
        ("/v1/completions", Some("/v1/completions")),
        ("/v1/completions?a=b%2f..&c=//evil/", Some("/v1/completions?a=b%2f..&c=//evil/")),
        ("//evil/v1", Some("//evil/v1")),
        ("/%2f%2fevil", Some("/%2f%2fevil")),
        ("/@evil:80/", Some("/@evil:80/")),
        ("/v1/completions?x#y", Some("/v1/completions?x")),
        ("*", None),
        ("", None),
        ("@evil", None),
        ("evil:80/x", None),
        ("http://evil/", None),
        ("/a b", None),
        ("/a\r\nhost: evil", None),
        ("/\u{fffd}", Some("/\u{fffd}")),
        (long.as_str(), None),
    ] {
        let built = build(Method::POST, "10.0.0.1:8000", path, HeaderMap::new(), Bytes::new());
        match (built, expected) {
            (Ok(request), Some(expected)) => {
                assert_eq!(request.uri().authority().unwrap(), "10.0.0.1:8000", "{path}");
                assert_eq!(request.uri().path_and_query().unwrap(), expected, "{path}");
            }
            (Err(error), None) => assert_eq!(error.class, LegFailure::RequestSetup, "{path}"),
            (built, _) => panic!("{path}: {built:?}"),
        }
    }
}
