"""Published models by name: their shapes, so that no file has to be fetched."""

from bigmodel.models.published import bert as bert
from bigmodel.models.published import gemma as gemma
from bigmodel.models.published import gpt2 as gpt2
from bigmodel.models.published import llama as llama
from bigmodel.models.published import mistral as mistral
from bigmodel.models.published import qwen as qwen
from bigmodel.models.published import t5 as t5
from bigmodel.models.published import vit as vit
from bigmodel.models.published.table import PUBLISHED as PUBLISHED
from bigmodel.models.published.table import PublishedModel as PublishedModel
from bigmodel.models.published.table import SampleKind as SampleKind
