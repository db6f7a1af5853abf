//! One request from its head to its answer: record, fault, hold, dialect.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{CONNECTION, HeaderName, HeaderValue, SERVER, VARY};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;

use crate::answer::{ErrorStyle, Reply, SimBody};
use crate::config::Dialect;
use crate::conn::Conn;
use crate::fault::{Fault, Scripted};
use crate::state::{Core, Served};
use crate::{ambient, control, sglang, trtllm, vllm};

const PROBES: [&str; 4] = ["/metrics", "/health", "/ping", "/prometheus/metrics"];

/// Serves one request. Cancelled by the connection when the client leaves.
pub(crate) async fn handle(core: Arc<Core>, conn: Arc<Conn>, request: Request<Incoming>) -> Response<SimBody> {
    let (head, body) = request.into_parts();
    let path = head.uri.path().to_owned();
    let is_control = control::is_control(&path);
    let dialect = core.config.dialect;
    let inference = is_inference(dialect, &path) && head.method == Method::POST;
    let recorded = !is_control && (core.config.record_probes || !PROBES.contains(&path.as_str()));
    let seq = recorded.then(|| core.records.begin(&head));
    let served = Served::new(&core, &conn, seq, inference);
    if let Some(seq) = seq
        && core.records.is_duplicate(seq)
    {
        core.meters.count(|counts| counts.duplicate_ids += 1);
    }
    core.changed();
    let (head_only, error) = (head.method == Method::HEAD, error_style(dialect, &path));
    let asked = Asked { core: &core, conn: &conn, head_only, seq, error };
    let body = match Limited::new(body, core.config.limits.body_bytes).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) if error.is::<LengthLimitError>() => {
            let reply = match dialect {
                Dialect::Vllm => vllm::too_large(),
                Dialect::Sglang => sglang::too_large(),
                Dialect::Trtllm => trtllm::too_large(),
            };
            return respond(&asked, served, reply, None);
        }
        Err(_) => {
            // The client left inside its own body, of which the connection tells only the reader of the body.
            conn.hang_up();
            std::future::pending().await
        }
    };
    if let Some(seq) = seq {
        core.records.body(seq, &body);
        core.changed();
    }
    if is_control {
        let reply = control::answer(&core, &head.method, &path, &body);
        return respond(&asked, served, reply, None);
    }
    let fault = core.faults.take(&path, &head.headers);
    if inference {
        core.gate.pass().await;
    }
    if let Some(fault) = &fault {
        prepare(&core, &conn, fault).await;
    }
    let scripted = fault.as_ref().and_then(|fault| fault.answer.clone());
    let reply = match scripted {
        Some(scripted) => {
            if fault.as_ref().is_some_and(|fault| fault.after_work) {
                work(&core, &head, &body, seq, fault.as_ref()).await;
            }
            word_for_word(scripted)
        }
        None => work(&core, &head, &body, seq, fault.as_ref()).await,
    };
    respond(&asked, served, reply, fault)
}

/// What the engine itself answers.
async fn work(core: &Arc<Core>, head: &Parts, body: &[u8], seq: Option<u64>, fault: Option<&Fault>) -> Reply {
    let seq = seq.unwrap_or_default();
    match core.config.dialect {
        Dialect::Vllm => vllm::answer(core, head, body, seq, fault).await,
        Dialect::Sglang => sglang::answer(core, head, body, seq, fault).await,
        Dialect::Trtllm => trtllm::answer(core, head, body, seq, fault).await,
    }
}

fn is_inference(dialect: Dialect, path: &str) -> bool {
    match dialect {
        Dialect::Vllm => vllm::is_inference(path),
        Dialect::Sglang => sglang::is_inference(path),
        Dialect::Trtllm => trtllm::is_inference(path),
    }
}

/// How a scripted error event looks on `path`.
fn error_style(dialect: Dialect, path: &str) -> ErrorStyle {
    match dialect {
        Dialect::Vllm => ErrorStyle::Event(vllm::ERROR_EVENT),
        Dialect::Sglang => ErrorStyle::Event(sglang::ERROR_EVENT),
        Dialect::Trtllm if path.ends_with("/chat/completions") => ErrorStyle::Cut,
        Dialect::Trtllm => ErrorStyle::EventAndTwoDones(trtllm::ERROR_EVENT),
    }
}

/// What a fault does before the request is worked on.
async fn prepare(core: &Core, conn: &Conn, fault: &Fault) {
    if let Some(idle) = fault.idle_close {
        conn.set_idle(idle);
    }
    ambient::pause(fault.head_delay).await;
    if fault.crash {
        core.crash();
    }
    if fault.hang {
        std::future::pending::<()>().await;
    }
    if let Some(cut) = fault.cut_before_head {
        conn.cut(cut);
        // The connection drops this future.
        std::future::pending::<()>().await;
    }
}

fn word_for_word(scripted: Scripted) -> Reply {
    let Scripted { status, headers, body, chunked } = scripted;
    if body.len() > 1 || chunked {
        return Reply::Raw { status, headers, writes: body, chunked };
    }
    Reply::Whole { status, headers, body: body.into_iter().next().unwrap_or_else(Bytes::new) }
}

/// What answers have in common with the request they answer.
struct Asked<'a> {
    core: &'a Core,
    conn: &'a Arc<Conn>,
    head_only: bool,
    seq: Option<u64>,
    error: ErrorStyle,
}

fn respond(asked: &Asked<'_>, served: Served, mut reply: Reply, fault: Option<Fault>) -> Response<SimBody> {
    let scripted = fault.as_ref().is_some_and(|fault| fault.answer.is_some());
    let close = fault.as_ref().is_some_and(|fault| fault.close_connection);
    let (status, headers) = match &mut reply {
        Reply::Whole { status, headers, .. } | Reply::Raw { status, headers, .. } => (*status, std::mem::take(headers)),
        Reply::Stream(_) => (200, vec![("content-type".to_owned(), "text/event-stream; charset=utf-8".to_owned())]),
    };
    if let Some(seq) = asked.seq {
        asked.core.records.status(seq, status);
        asked.core.changed();
    }
    let mut body = SimBody::new(reply, asked.conn.clone(), fault, asked.error, Some(served));
    if asked.head_only {
        body = body.without_content();
    }
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let out = response.headers_mut();
    if !scripted {
        out.insert(SERVER, HeaderValue::from_static("uvicorn"));
        out.insert(VARY, HeaderValue::from_static("Origin"));
    }
    for (name, value) in headers {
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) {
            out.append(name, value);
        }
    }
    if close {
        out.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}
