"""What the Open Inference Protocol answers, built from the events of a generation."""

from collections.abc import Mapping, Sequence

from pageferry.core.errors import PageferryError
from pageferry.oip import open_inference_pb2 as oip
from pageferry.router.oip_request import FINISH_REASON, TEXT_OUTPUT, VERSION, Inference, bytes_element
from pageferry.router.request_span import finish_name
from pageferry.v1 import inference_pb2 as pb

_IS_LAST = "triton_final_response"
_Parameters = dict[str, oip.InferParameter]


class Reply:
    """The answers to one request."""

    def __init__(self, inference: Inference, started: pb.Started) -> None:
        self._inference = inference
        self._started = started
        num_answers = max(1, inference.generate.n)
        self._has_several = num_answers > 1
        self._texts = ["" for _ in range(num_answers)]  # where all is answered at once
        self._reasons = ["" for _ in range(num_answers)]

    def take(self, event: pb.GenerateResponse) -> oip.ModelInferResponse | None:
        """The answer to send now, if there is one."""
        match event.WhichOneof("event"):
            case "delta":
                return self._delta(event.delta)
            case "choice_finished":
                return self._choice_finished(event.choice_finished)
            case "finished":
                return self._finished(event.finished)
        return None

    def _delta(self, delta: pb.Delta) -> oip.ModelInferResponse | None:
        if not self._inference.stream:
            self._texts[delta.choice] += delta.text
            return None
        return self._part(delta.choice, {TEXT_OUTPUT: [delta.text]}) if delta.text else None

    def _choice_finished(self, choice: pb.ChoiceFinished) -> oip.ModelInferResponse | None:
        reason = self._reasons[choice.choice] = finish_name(choice.reason)
        if not self._inference.stream:
            return None
        return self._part(choice.choice, {TEXT_OUTPUT: [""], FINISH_REASON: [reason]})

    def _finished(self, finished: pb.Finished) -> oip.ModelInferResponse:
        parameters = {
            "trace_id": oip.InferParameter(string_param=self._started.trace_id),
            **{
                name: oip.InferParameter(int64_param=getattr(finished.usage, name))
                for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
            },
        }
        self._reasons[0] = finish_name(finished.reason)
        if not self._inference.stream:
            return self._answer({TEXT_OUTPUT: self._texts, FINISH_REASON: self._reasons}, parameters)
        parameters[_IS_LAST] = oip.InferParameter(bool_param=True)
        return self._answer({TEXT_OUTPUT: [""], FINISH_REASON: self._reasons[:1]}, parameters)

    def _part(self, choice: int, outputs: Mapping[str, Sequence[str]]) -> oip.ModelInferResponse:
        parameters = {_IS_LAST: oip.InferParameter(bool_param=False)}
        if self._has_several:
            parameters["choice"] = oip.InferParameter(int64_param=choice)
        return self._answer(outputs, parameters)

    def _answer(self, outputs: Mapping[str, Sequence[str]], parameters: _Parameters) -> oip.ModelInferResponse:
        answer = oip.ModelInferResponse(
            model_name=self._started.model,
            model_version=VERSION,
            id=self._inference.id or self._started.request_id,
            parameters=parameters,
        )
        for name, texts in outputs.items():
            if name in self._inference.outputs:
                tensor = answer.outputs.add(name=name, datatype="BYTES", shape=[len(texts)])
                elements = [text.encode() for text in texts]
                if self._inference.raw:
                    answer.raw_output_contents.append(b"".join(map(bytes_element, elements)))
                else:
                    tensor.contents.bytes_contents.extend(elements)
        return answer


def failure(request: oip.ModelInferRequest, error: PageferryError) -> oip.ModelStreamInferResponse:
    """What a stream answers to a request that failed."""
    answer = oip.ModelInferResponse(model_name=request.model_name, id=request.id)
    answer.parameters["code"].string_param = error.code
    answer.parameters["reason"].string_param = error.reason
    if error.retry_after_ms is not None:
        answer.parameters["retry_after_ms"].int64_param = error.retry_after_ms
    answer.parameters[_IS_LAST].bool_param = True
    return oip.ModelStreamInferResponse(error_message=f"{error.code}: {error.message}", infer_response=answer)
