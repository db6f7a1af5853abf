//! Against a server whose answers are given one by one.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::*;

const GOOD: &str = r#"{"disaggregated_params":{"ctx_info_endpoint":"tcp://10.0.0.5:5555","ctx_dp_rank":0,"extra":1}}"#;

const OTHER: &str = r#"{"disaggregated_params":{"ctx_info_endpoint":"tcp://10.0.0.6:5555","ctx_dp_rank":1}}"#;

/// A pod that is asked.
struct Pod {
    listener: TcpListener,
    address: Arc<str>,
}

/// A question that waits for its answer.
struct Question {
    line: String,
    socket: TcpStream,
}

impl Question {
    async fn answer(mut self, status: &str, body: &str) {
        let head = format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
        // A client that has had enough closes the connection.
        let _ = self.socket.write_all(head.as_bytes()).await;
        let _ = self.socket.write_all(body.as_bytes()).await;
    }
}

impl Pod {
    async fn new() -> Pod {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string().into();
        Pod { listener, address }
    }

    fn key(&self) -> LookupKey {
        LookupKey { uid: "u".into(), restarts: 0, address: Arc::clone(&self.address) }
    }

    fn port(&self) -> u16 {
        self.listener.local_addr().unwrap().port()
    }

    /// The next question, read to its end.
    async fn asked(&self) -> Question {
        let mut socket = self.listener.accept().await.unwrap().0;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            assert!(socket.read_buf(&mut head).await.unwrap() > 0, "the question is cut");
        }
        let line = String::from_utf8_lossy(&head).lines().next().unwrap_or_default().to_owned();
        Question { line, socket }
    }

    async fn answers(&self, status: &str, body: &str) -> String {
        let question = self.asked().await;
        let line = question.line.clone();
        question.answer(status, body).await;
        line
    }

    /// Nobody asks while this future is polled first.
    async fn nobody<T>(&self, work: impl Future<Output = T>) -> T {
        tokio::select! {
            biased;
            question = self.asked() => panic!("asked: {}", question.line),
            done = work => done,
        }
    }
}

fn lookups() -> Lookups {
    Lookups::new(EngineClient::new(), None, TaskTracker::new())
}

fn info(answer: &str) -> Answer {
    INFO.read(answer.as_bytes()).map(Arc::new)
}

const INFO: LookupKind = LookupKind::ServerInfo;

fn seconds(seconds: u64) -> Tick {
    Tick::from_millis(1_000 * seconds)
}

#[tokio::test]
async fn interop_32_within_a_minute_a_pod_is_asked_once() {
    let (pod, lookups) = (Pod::new().await, lookups());
    let (answer, line) = tokio::join!(lookups.get(pod.key(), INFO, seconds(10)), pod.answers("200 OK", GOOD));
    assert_eq!((answer, &*line), (info(GOOD), "GET /server_info HTTP/1.1"));
    for now in [Tick::from_millis(69_999), seconds(10), seconds(0)] {
        assert_eq!(pod.nobody(lookups.get(pod.key(), INFO, now)).await, info(GOOD));
    }
    // The minute is over; so it is for another incarnation.
    let (answer, _) = tokio::join!(lookups.get(pod.key(), INFO, seconds(70)), pod.answers("200 OK", OTHER));
    assert_eq!(answer, info(OTHER));
    for key in [LookupKey { restarts: 1, ..pod.key() }, LookupKey { uid: "v".into(), ..pod.key() }] {
        let (answer, _) = tokio::join!(lookups.get(key, INFO, seconds(70)), pod.answers("200 OK", GOOD));
        assert_eq!(answer, info(GOOD));
    }
    assert_eq!(pod.nobody(lookups.get(pod.key(), INFO, seconds(71))).await, info(OTHER));
}

#[tokio::test]
async fn interop_33_failures_are_told_and_not_kept() {
    let (pod, lookups) = (Pod::new().await, lookups());
    let long = format!("{{\"x\":\"{}\"}}", "x".repeat(2 << 20));
    let no_endpoint = LookupError::ServerInfo(ServerInfoError::NoEndpoint);
    let no_rank = LookupError::ServerInfo(ServerInfoError::NoRank);
    let params = |rank: &str| format!(r#"{{"disaggregated_params":{{"ctx_info_endpoint":"e","ctx_dp_rank":{rank}}}}}"#);
    for (status, body, expected, class) in [
        ("200 OK", r#"{"disaggregated_params":{}}"#, no_endpoint, LegFailure::BadResponse),
        ("200 OK", &params("null"), no_rank.clone(), LegFailure::BadResponse),
        ("200 OK", &params("1.5"), no_rank, LegFailure::BadResponse),
        ("302 Found\r\nlocation: /health", GOOD, LookupError::Status(StatusCode::FOUND), LegFailure::HttpStatus),
        ("500 Oops", GOOD, LookupError::Status(StatusCode::INTERNAL_SERVER_ERROR), LegFailure::HttpStatus),
        ("204 No Content", "", LookupError::Status(StatusCode::NO_CONTENT), LegFailure::HttpStatus),
        (
            "200 OK",
            &long,
            LookupError::Failed {
                class: LegFailure::BadResponse,
                detail: "answer longer than 1048576 bytes".to_owned(),
            },
            LegFailure::BadResponse,
        ),
    ] {
        let (answer, _) = tokio::join!(lookups.get(pod.key(), INFO, seconds(1)), pod.answers(status, body));
        assert_eq!(expected.class(), class, "{status}");
        assert_eq!(answer, Err(expected), "{status}");
    }
    let (answer, _) = tokio::join!(lookups.get(pod.key(), INFO, seconds(1)), pod.answers("200 OK", GOOD));
    assert_eq!(answer, info(GOOD));
    let gone = Pod::new().await;
    let key = gone.key();
    drop(gone);
    let answer = lookups.get(key, INFO, seconds(1)).await;
    assert!(matches!(answer, Err(LookupError::Failed { class: LegFailure::Transport, .. })), "{answer:?}");
}

#[tokio::test(start_paused = true)]
async fn interop_33_a_slow_pod_is_given_three_seconds() {
    for (kind, detail) in
        [(INFO, "no answer within 3 s"), (LookupKind::MooncakeQuery { port: 0, rank: 0 }, "no answer within 5 s")]
    {
        let (pod, lookups) = (Pod::new().await, lookups());
        let kind = if kind == INFO { kind } else { LookupKind::MooncakeQuery { port: pod.port(), rank: 0 } };
        let (answer, _question) = tokio::join!(lookups.get(pod.key(), kind, seconds(1)), pod.asked());
        assert_eq!(answer, Err(LookupError::Failed { class: LegFailure::Timeout, detail: detail.to_owned() }));
        // The next one asks again.
        tokio::select! {
            answer = lookups.get(pod.key(), kind, seconds(1)) => panic!("{answer:?}"),
            question = pod.asked() => assert!(question.line.starts_with("GET ")),
        }
    }
}

#[tokio::test]
async fn many_who_want_to_know_ask_once_and_who_leaves_takes_it_from_nobody() {
    let (pod, lookups) = (Pod::new().await, lookups());
    // The first one asks, and leaves as soon as the question has arrived.
    let question = tokio::select! {
        biased;
        question = pod.asked() => question,
        answer = lookups.get(pod.key(), INFO, seconds(1)) => panic!("{answer:?}"),
    };
    let waiters = futures_util::future::join_all((0..50).map(|_| lookups.get(pod.key(), INFO, seconds(1))));
    let (answers, ()) = pod.nobody(async { tokio::join!(waiters, question.answer("200 OK", GOOD)) }).await;
    assert_eq!(answers, vec![info(GOOD); 50]);
    assert!(lookups.shared.running.lock().unwrap().is_empty());
    // A failure, too, is told to all who waited for it.
    let waiters = futures_util::future::join_all((0..50).map(|_| lookups.get(pod.key(), INFO, seconds(100))));
    let (answers, _) = tokio::join!(waiters, pod.answers("503 Busy", ""));
    assert_eq!(answers, vec![Err(LookupError::Status(StatusCode::SERVICE_UNAVAILABLE)); 50]);
}

#[tokio::test]
async fn a_bootstrap_server_is_asked_on_its_own_port() {
    let (pod, lookups) = (Pod::new().await, lookups());
    let key = LookupKey { address: "127.0.0.1:1".into(), ..pod.key() };
    let kind = LookupKind::MooncakeQuery { port: pod.port(), rank: 0 };
    let body = r#"{"0":{"engine_id":"engine-0","worker_addr":{}}}"#;
    let (answer, line) = tokio::join!(lookups.get(key.clone(), kind, seconds(0)), pod.answers("200 OK", body));
    let expected: Answer = Ok(Arc::new(LookedUp::Engine(RankEngine { id: "engine-0".to_owned(), pin: Some(0) })));
    assert_eq!((&answer, &*line), (&expected, "GET /query HTTP/1.1"));
    assert_eq!(pod.nobody(lookups.get(key.clone(), kind, Tick::from_millis(299_999))).await, expected);
    let (answer, _) = tokio::join!(lookups.get(key, kind, seconds(300)), pod.answers("200 OK", "{}"));
    assert_eq!(answer, Err(LookupError::EngineId(EngineIdError::NoEngine)));
    for (serving, expected) in
        [("10.0.0.5:8000", "10.0.0.5:9"), ("[fd00::5]:8000", "[fd00::5]:9"), ("pod-1:80", "pod-1:9")]
    {
        assert_eq!(LookupKind::MooncakeQuery { port: 9, rank: 0 }.address(serving), expected);
    }
}

#[tokio::test]
async fn memory_is_bounded_and_the_oldest_goes_first() {
    let lookups = lookups();
    let shared = &lookups.shared;
    let key = |at: usize| {
        let pod = LookupKey { uid: format!("{at}").into(), restarts: 0, address: "h:1".into() };
        (pod, INFO)
    };
    for at in 0..MAX_ENTRIES {
        shared.keep(&key(at), Tick(1_000 + at as u64), &info(GOOD));
    }
    assert_eq!(shared.ready.len(), MAX_ENTRIES);
    // A newer answer for one that is there takes no place.
    shared.keep(&key(0), Tick(9_000), &info(OTHER));
    assert_eq!(shared.ready.len(), MAX_ENTRIES);
    shared.keep(&key(5_000), Tick(9_001), &info(GOOD));
    assert_eq!(shared.ready.len(), MAX_ENTRIES);
    let known = |at| shared.fresh(&key(at), Tick(9_002)).is_some();
    assert_eq!((known(0), known(1), known(2), known(5_000)), (true, false, true, true));
    // Those that are too old anyway go all at once.
    shared.keep(&key(6_000), seconds(120), &info(GOOD));
    assert_eq!(shared.ready.len(), 1);
    assert!(shared.fresh(&key(6_000), seconds(121)).is_some());
}

#[tokio::test]
async fn a_question_that_was_given_up_is_asked_again() {
    let (pod, lookups) = (Pod::new().await, lookups());
    let key = (pod.key(), INFO);
    // As a task that panicked would leave it.
    let (lost, receiver) = watch::channel(None);
    lookups.shared.running.lock().unwrap().insert(key.clone(), receiver);
    let (waiting, ()) = tokio::join!(lookups.get(pod.key(), INFO, seconds(0)), async { drop(lost) });
    assert_eq!(waiting, Err(LookupError::Lost));
    let (answer, _) = tokio::join!(lookups.get(pod.key(), INFO, seconds(0)), pod.answers("200 OK", GOOD));
    assert_eq!(answer, info(GOOD));
}
