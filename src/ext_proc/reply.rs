//! Replies as Envoy wants them.

use std::time::Duration;

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::HeaderValueOption;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response as Reply;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    BodyMutation, BodyResponse, CommonResponse, HeaderMutation, HeadersResponse, ImmediateResponse, ProcessingResponse,
    TrailersResponse, body_mutation,
};
use envoy_types::pb::envoy::r#type::v3::HttpStatus;
use http::HeaderMap;

use super::convert::set_header;
use crate::error::ApiError;
use crate::exchange::{OwnAnswer, RoutePlan};

/// Time beyond the prefill timeout that Envoy should wait, so that our own error arrives before Envoy's.
const TIMEOUT_MARGIN: Duration = Duration::from_secs(5);

fn response(reply: Reply) -> ProcessingResponse {
    ProcessingResponse { response: Some(reply), ..ProcessingResponse::default() }
}

fn headers_response(mutation: HeaderMutation) -> HeadersResponse {
    // The route depends on headers that are set here and in the body phase.
    let common =
        CommonResponse { header_mutation: Some(mutation), clear_route_cache: true, ..CommonResponse::default() };
    HeadersResponse { response: Some(common) }
}

fn options(headers: &HeaderMap) -> Vec<HeaderValueOption> {
    headers.iter().map(|(name, value)| set_header(name.as_str(), value.as_bytes())).collect()
}

/// Reply to request headers: go on, to the body if there is one.
pub fn accept_head(remove: Vec<String>) -> ProcessingResponse {
    let set_headers = vec![set_header("x-went-into-req-headers", b"true")];
    response(Reply::RequestHeaders(headers_response(HeaderMutation { set_headers, remove_headers: remove })))
}

/// "The real reply takes longer": Envoy restarts its timer once with this value.
pub fn extend_timeout(wait: Duration) -> ProcessingResponse {
    let wait = wait.saturating_add(TIMEOUT_MARGIN);
    let seconds = i64::try_from(wait.as_secs()).unwrap_or(i64::MAX);
    let nanos = wait.subsec_nanos().cast_signed();
    let timeout = envoy_types::pb::google::protobuf::Duration { seconds, nanos };
    ProcessingResponse { override_message_timeout: Some(timeout), ..ProcessingResponse::default() }
}

/// Reply to the request body: where it goes and with which bytes.
pub fn route(plan: RoutePlan, trace_headers: &HeaderMap) -> ProcessingResponse {
    let mut set_headers: Vec<_> =
        plan.set_headers.iter().map(|(name, value)| set_header(name, value.as_bytes())).collect();
    set_headers.extend(options(trace_headers));
    set_headers.extend(plan.authorization.map(|value| set_header("authorization", value.as_bytes())));
    // Envoy fails a request whose length and body disagree.
    set_headers.push(set_header("content-length", plan.body.len().to_string().as_bytes()));
    let common = CommonResponse {
        header_mutation: Some(HeaderMutation { set_headers, remove_headers: Vec::new() }),
        body_mutation: Some(BodyMutation { mutation: Some(body_mutation::Mutation::Body(into_vec(plan.body))) }),
        clear_route_cache: true,
        ..CommonResponse::default()
    };
    response(Reply::RequestBody(BodyResponse { response: Some(common) }))
}

/// Reply to request headers that are the whole request: where it goes.
pub fn route_head(plan: RoutePlan, trace_headers: &HeaderMap) -> ProcessingResponse {
    let mut set_headers: Vec<_> =
        plan.set_headers.iter().map(|(name, value)| set_header(name, value.as_bytes())).collect();
    set_headers.extend(options(trace_headers));
    set_headers.extend(plan.authorization.map(|value| set_header("authorization", value.as_bytes())));
    set_headers.push(set_header("x-went-into-req-headers", b"true"));
    // Envoy removes before it sets.
    let mutation = HeaderMutation { set_headers, remove_headers: plan.remove_headers };
    response(Reply::RequestHeaders(headers_response(mutation)))
}

/// Takes the bytes over without a copy when nobody else holds them.
fn into_vec(body: Bytes) -> Vec<u8> {
    Vec::from(body)
}

/// Reply to response headers.
pub fn forward_head(add: &HeaderMap) -> ProcessingResponse {
    let mutation = HeaderMutation { set_headers: options(add), remove_headers: Vec::new() };
    let common = CommonResponse { header_mutation: Some(mutation), ..CommonResponse::default() };
    response(Reply::ResponseHeaders(HeadersResponse { response: Some(common) }))
}

/// Reply to a response chunk: leave it as it is.
pub fn forward_chunk() -> ProcessingResponse {
    response(Reply::ResponseBody(BodyResponse { response: None }))
}

/// Reply to a response chunk: this in its place.
pub fn replace_chunk(bytes: Bytes) -> ProcessingResponse {
    let mutation = Some(BodyMutation { mutation: Some(body_mutation::Mutation::Body(into_vec(bytes))) });
    let common = CommonResponse { body_mutation: mutation, ..CommonResponse::default() };
    response(Reply::ResponseBody(BodyResponse { response: Some(common) }))
}

/// Replies to trailers, which are not asked for but answered all the same.
pub fn request_trailers() -> ProcessingResponse {
    response(Reply::RequestTrailers(TrailersResponse { header_mutation: None }))
}

/// See [`request_trailers`].
pub fn response_trailers() -> ProcessingResponse {
    response(Reply::ResponseTrailers(TrailersResponse { header_mutation: None }))
}

/// A whole answer from a prefill pod.
pub fn answer(own: OwnAnswer) -> ProcessingResponse {
    response(Reply::ImmediateResponse(ImmediateResponse {
        status: Some(HttpStatus { code: 200 }),
        headers: Some(HeaderMutation { set_headers: options(&own.headers), remove_headers: Vec::new() }),
        body: into_vec(own.body),
        grpc_status: None,
        details: "answered_by_prefill".to_owned(),
    }))
}

/// The client's error, made here.
pub fn refuse(error: &ApiError) -> ProcessingResponse {
    response(Reply::ImmediateResponse(ImmediateResponse {
        status: Some(HttpStatus { code: i32::from(error.status.as_u16()) }),
        headers: Some(HeaderMutation { set_headers: options(&error.headers()), remove_headers: Vec::new() }),
        body: into_vec(error.body()),
        grpc_status: None,
        details: error.reason.label().to_owned(),
    }))
}
