"""The base of all settings: typed, strict, frozen. And the bounds that numbers have in them."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are not coerced, nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
