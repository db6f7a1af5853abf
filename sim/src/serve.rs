//! One request from its head to its answer: record, fault, hold, dialect.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{CONNECTION, HeaderName, HeaderValue, SERVER, VARY};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;

use crate::answer::{Reply, SimBody};
use crate::conn::Conn;
use crate::fault::{Fault, Scripted};
use crate::state::{Core, Served};
use crate::{ambient, control, vllm};

const PROBES: [&str; 3] = ["/metrics", "/health", "/ping"];

/// Serves one request. Cancelled by the connection when the client leaves.
pub(crate) async fn handle(core: Arc<Core>, conn: Arc<Conn>, request: Request<Incoming>) -> Response<SimBody> {
    let (head, body) = request.into_parts();
    let path = head.uri.path().to_owned();
    let is_control = control::is_control(&path);
    let inference = vllm::is_inference(&path) && head.method == Method::POST;
    let recorded = !is_control && (core.config.record_probes || !PROBES.contains(&path.as_str()));
    let seq = recorded.then(|| core.records.begin(&head));
    let served = Served::new(&core, &conn, seq, inference);
    if let Some(seq) = seq
        && core.records.is_duplicate(seq)
    {
        core.meters.count(|counts| counts.duplicate_ids += 1);
    }
    core.changed();
    let body = match Limited::new(body, core.config.limits.body_bytes).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) if error.is::<LengthLimitError>() => {
            let reply = vllm::too_large();
            return respond(&core, &conn, head.method == Method::HEAD, seq, served, reply, None);
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
    let head_only = head.method == Method::HEAD;
    if is_control {
        let reply = control::answer(&core, &head.method, &path, &body);
        return respond(&core, &conn, head_only, seq, served, reply, None);
    }
    let fault = core.faults.take(&path);
    if inference {
        core.gate.pass().await;
    }
    if let Some(fault) = &fault {
        prepare(&conn, fault).await;
    }
    let reply = match fault.as_ref().and_then(|fault| fault.answer.clone()) {
        Some(scripted) => word_for_word(scripted),
        None => vllm::answer(&core, &head, &body, seq.unwrap_or_default(), fault.as_ref()).await,
    };
    respond(&core, &conn, head_only, seq, served, reply, fault)
}

/// What a fault does before the request is worked on.
async fn prepare(conn: &Conn, fault: &Fault) {
    if let Some(idle) = fault.idle_close {
        conn.set_idle(idle);
    }
    ambient::pause(fault.head_delay).await;
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

fn respond(
    core: &Core,
    conn: &Arc<Conn>,
    head_only: bool,
    seq: Option<u64>,
    served: Served,
    mut reply: Reply,
    fault: Option<Fault>,
) -> Response<SimBody> {
    let scripted = fault.as_ref().is_some_and(|fault| fault.answer.is_some());
    let close = fault.as_ref().is_some_and(|fault| fault.close_connection);
    let (status, headers) = match &mut reply {
        Reply::Whole { status, headers, .. } | Reply::Raw { status, headers, .. } => (*status, std::mem::take(headers)),
        Reply::Stream(_) => (200, vec![("content-type".to_owned(), "text/event-stream; charset=utf-8".to_owned())]),
    };
    if let Some(seq) = seq {
        core.records.status(seq, status);
        core.changed();
    }
    let mut body = SimBody::new(reply, conn.clone(), fault, Some(served));
    if head_only {
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
