"""Finding the fastest plan that fits."""

from bigmodel.search.deciding import decide as decide
from bigmodel.search.decision import Decision as Decision
from bigmodel.search.predicting import predict as predict
from bigmodel.search.prediction import Estimate as Estimate
from bigmodel.search.prediction import RankMemory as RankMemory
from bigmodel.search.prediction import Term as Term
from bigmodel.search.rejections import Rejected as Rejected
