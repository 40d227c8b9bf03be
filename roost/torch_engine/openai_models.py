"""Which models are served: the model, and adapters that come and go."""

from __future__ import annotations

import threading
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field

from roost.net.errors import Refused, refusing
from roost.torch_engine.served import Served

NotEmpty = Annotated[str, Field(min_length=1)]


class LoadBody(BaseModel):
    lora_name: NotEmpty
    lora_path: NotEmpty
    load_inplace: bool = False


class UnloadBody(BaseModel):
    lora_name: NotEmpty


def models_router(served: Served) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": model_cards(served)}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        for card in model_cards(served):
            if card["id"] == name:
                return card
        raise Refused(f"The model `{name}` does not exist", 404, "model")

    return router


def adapters_router(served: Served) -> APIRouter:
    router = APIRouter()
    one_at_a_time = threading.Lock()  # loading checks the names, takes a while, and then changes them

    @router.post("/v1/load_lora_adapter")
    def load_lora_adapter(body: LoadBody) -> PlainTextResponse:
        names = served.names
        with one_at_a_time:
            if body.lora_name == names.model:
                raise Refused(f"{body.lora_name} is the name of the model itself", field="lora_name")
            if body.lora_name in names.adapters and not body.load_inplace:
                raise Refused(
                    f"an adapter {body.lora_name} is loaded already; write load_inplace: true to replace it",
                    field="lora_name",
                )
            try:
                with refusing():
                    served.engine.load_adapter(body.lora_name, body.lora_path)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise Refused(f"there is no adapter in {body.lora_path}: {error}", 404, "lora_path") from error
            names.adapters[body.lora_name] = body.lora_path
        return PlainTextResponse(f"Success: adapter {body.lora_name} was loaded.")

    @router.post("/v1/unload_lora_adapter")
    def unload_lora_adapter(body: UnloadBody) -> PlainTextResponse:
        with one_at_a_time:
            if body.lora_name not in served.names.adapters:
                raise Refused(f"there is no adapter {body.lora_name}", 404, "lora_name")
            with refusing():
                served.engine.unload_adapter(body.lora_name)
            del served.names.adapters[body.lora_name]
        return PlainTextResponse(f"Success: adapter {body.lora_name} was unloaded.")

    return router


def model_cards(served: Served) -> list[dict[str, Any]]:
    names = served.names
    base: dict[str, Any] = {"object": "model", "created": served.created, "owned_by": "roost"}
    model: dict[str, Any] = {
        "id": names.model,
        "root": served.folder,
        "parent": None,
        "max_model_len": served.engine.max_context,
    }
    adapters: list[dict[str, Any]] = [
        {"id": name, "root": folder, "parent": names.model, "max_model_len": None}
        for name, folder in names.adapters.items()
    ]
    return [{**card, **base} for card in (model, *adapters)]
