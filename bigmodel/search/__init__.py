"""Finding the fastest plan that fits."""

from bigmodel.search.deciding import decide as decide
from bigmodel.search.predicting import predict as predict
from bigmodel.search.prediction import Decision as Decision
from bigmodel.search.prediction import Estimate as Estimate
from bigmodel.search.prediction import RankMemory as RankMemory
from bigmodel.search.prediction import Rejected as Rejected
from bigmodel.search.prediction import Term as Term
